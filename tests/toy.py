"""Names the tiny models of `memory.testing` as tests know them."""

from hybridmem.memory.testing.toys import HOST, N_MODEL, VOCAB, FamilyToy, Toy, average, delta, moved, project

__all__ = ["HOST", "N_MODEL", "VOCAB", "FamilyToy", "Toy", "average", "delta", "moved", "project"]
