"""One memory for attention and recurrent layers: slots, rollback, forks and reordering, always in step."""

from memory.errors import (
    BatchError,
    CapacityError,
    FormatError,
    HybridMemoryError,
    IntegrityError,
    RollbackError,
    SequenceError,
    SpecError,
    StepError,
)
from memory.hybrid import HybridMemory
from memory.interface import AttentionSpec, CrossAttentionSpec, MemorySpec, Recurrence, RecurrentSpec, Sequence, StateTensor
from memory.recurrent_state import States
from memory.step import Step

__all__ = [
    "AttentionSpec",
    "BatchError",
    "CapacityError",
    "CrossAttentionSpec",
    "FormatError",
    "HybridMemory",
    "HybridMemoryError",
    "IntegrityError",
    "MemorySpec",
    "Recurrence",
    "RecurrentSpec",
    "RollbackError",
    "Sequence",
    "SequenceError",
    "SpecError",
    "StateTensor",
    "States",
    "Step",
    "StepError",
]
