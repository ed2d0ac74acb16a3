"""Remembers what hybrid language models have read: attention and recurrent layers in step, through every way back.

`hybridmem.memory` is the memory, `hybridmem.models` loads models that run on it, `hybridmem.chat` holds the engine,
chats, the command line and the server, and `hybridmem.cluster` several replicas. What most programs need is here:

    from hybridmem import HybridMemory, load_model

Names are imported when they are first used, because torch and transformers take seconds. In the repository the four
packages are folders of their own, to which this folder has links.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridmem.memory import (
        UNROTATED,
        AttentionSpec,
        BatchError,
        CapacityError,
        ChosenRows,
        CrossAttentionSpec,
        DropError,
        Family,
        FormatError,
        HybridMemory,
        HybridMemoryError,
        IndexSpec,
        IntegrityError,
        MemorySpec,
        MismatchError,
        Passage,
        Recurrence,
        RecurrentSpec,
        RollbackError,
        Rotation,
        Sequence,
        SequenceError,
        SoftTokens,
        SpecError,
        States,
        StateTensor,
        Step,
        StepError,
    )
    from hybridmem.models import (
        ARCHITECTURES,
        ATTACHABLE,
        EMBEDDED,
        Attached,
        Checkpoint,
        HybridCache,
        LanguageModel,
        Trainable,
        UnsupportedModelError,
        add_lora,
        attach,
        from_transformers,
        load_model,
        plan_memory,
        weight_bytes,
    )

__version__ = "0.1.0"

_OF_MODELS = {
    "ARCHITECTURES",
    "ATTACHABLE",
    "EMBEDDED",
    "Attached",
    "Checkpoint",
    "HybridCache",
    "LanguageModel",
    "Trainable",
    "UnsupportedModelError",
    "add_lora",
    "attach",
    "from_transformers",
    "load_model",
    "plan_memory",
    "weight_bytes",
}

__all__ = [
    "ARCHITECTURES",
    "ATTACHABLE",
    "EMBEDDED",
    "UNROTATED",
    "Attached",
    "AttentionSpec",
    "BatchError",
    "CapacityError",
    "Checkpoint",
    "ChosenRows",
    "CrossAttentionSpec",
    "DropError",
    "Family",
    "FormatError",
    "HybridCache",
    "HybridMemory",
    "HybridMemoryError",
    "IndexSpec",
    "IntegrityError",
    "LanguageModel",
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
    "Trainable",
    "UnsupportedModelError",
    "__version__",
    "add_lora",
    "attach",
    "from_transformers",
    "load_model",
    "plan_memory",
    "weight_bytes",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("hybridmem.models" if name in _OF_MODELS else "hybridmem.memory"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
