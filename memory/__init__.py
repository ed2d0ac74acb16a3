"""Keeps what attention and recurrent layers remember, behind one interface with rollback, forks and reordering."""

if not __name__.startswith("hybridmem."):
    raise ImportError("this folder is a package of hybridmem: import hybridmem.memory")


from hybridmem.memory.errors import (
    BatchError,
    CapacityError,
    DropError,
    FormatError,
    HybridMemoryError,
    IntegrityError,
    MismatchError,
    RollbackError,
    SequenceError,
    SpecError,
    StepError,
)
from hybridmem.memory.hybrid import HybridMemory
from hybridmem.memory.interface import Sequence
from hybridmem.memory.rotary import UNROTATED, Rotation
from hybridmem.memory.sequences.choosing import ChosenRows
from hybridmem.memory.sequences.soft_tokens import Passage, SoftTokens
from hybridmem.memory.specs import (
    AttentionSpec,
    CrossAttentionSpec,
    IndexSpec,
    MemorySpec,
    RecurrentSpec,
    StateTensor,
)
from hybridmem.memory.state.access import Recurrence, States
from hybridmem.memory.step import Step
from hybridmem.memory.storage.archive import Family

__all__ = [
    "UNROTATED",
    "AttentionSpec",
    "BatchError",
    "CapacityError",
    "ChosenRows",
    "CrossAttentionSpec",
    "DropError",
    "Family",
    "FormatError",
    "HybridMemory",
    "HybridMemoryError",
    "IndexSpec",
    "IntegrityError",
    "MemorySpec",
    "MismatchError",
    "Passage",
    "Recurrence",
    "RecurrentSpec",
    "RollbackError",
    "Rotation",
    "Sequence",
    "SequenceError",
    "SoftTokens",
    "SpecError",
    "StateTensor",
    "States",
    "Step",
    "StepError",
]
