"""Contains the models that run on a `HybridMemory`, and functions that load them.

`families` has one short file for each family of models.

Models, and the code that works on models of transformers, are imported when they are first used, because importing
transformers takes seconds.
"""

if not __name__.startswith("hybridmem."):
    raise ImportError("this folder is a package of hybridmem: import hybridmem.models")


from importlib import import_module
from typing import TYPE_CHECKING, Any

from hybridmem.models.loading.architectures import ARCHITECTURES, LanguageModel
from hybridmem.models.loading.folders import EMBEDDED
from hybridmem.models.loading.load import from_transformers, load_model, plan_memory, weight_bytes
from hybridmem.models.weights.checkpoint import Checkpoint, UnsupportedModelError

if TYPE_CHECKING:
    from hybridmem.models.hf.attach import Attached, attach
    from hybridmem.models.hf.cache import HybridCache
    from hybridmem.models.hf.classes import ATTACHABLE
    from hybridmem.models.loading.trainable import Trainable, add_lora

_LATER = {
    "ATTACHABLE": "hf.classes", "Attached": "hf.attach", "HybridCache": "hf.cache", "Trainable": "loading.trainable",
    "add_lora": "loading.trainable", "attach": "hf.attach",
}  # fmt: skip
"""Names that are imported when they are first used, and their modules."""

__all__ = [
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
]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"hybridmem.models.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
