"""Remembers the past of attention and recurrent layers alike: slots, rollback, forks and reordering, in step."""

from memory.errors import (
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
from memory.hybrid import HybridMemory
from memory.interface import Sequence
from memory.rotary import UNROTATED, Rotation
from memory.specs import AttentionSpec, CrossAttentionSpec, MemorySpec, RecurrentSpec, StateTensor
from memory.state.access import Recurrence, States
from memory.step import Step
from memory.storage.archive import Family

__all__ = [
    "UNROTATED",
    "AttentionSpec",
    "BatchError",
    "CapacityError",
    "CrossAttentionSpec",
    "DropError",
    "Family",
    "FormatError",
    "HybridMemory",
    "HybridMemoryError",
    "IntegrityError",
    "MemorySpec",
    "MismatchError",
    "Recurrence",
    "RecurrentSpec",
    "RollbackError",
    "Rotation",
    "Sequence",
    "SequenceError",
    "SpecError",
    "StateTensor",
    "States",
    "Step",
    "StepError",
]
