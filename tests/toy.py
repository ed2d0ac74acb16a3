"""The tiny models of `memory.testing`, by the name that tests know them by."""

from hybridmem.memory.testing.toys import HOST, N_MODEL, VOCAB, FamilyToy, Toy, average, delta, moved, project

__all__ = ["HOST", "N_MODEL", "VOCAB", "FamilyToy", "Toy", "average", "delta", "moved", "project"]
