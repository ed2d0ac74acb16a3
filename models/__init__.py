"""Contains the models that run on a `HybridMemory`, one short file for each family, and functions that load them.

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
    from hybridmem.models import (
        bamba,
        bart,
        deepseek,
        falcon_h1,
        gemma,
        granite_moe_hybrid,
        jamba,
        lfm2,
        llama,
        mamba,
        nemotron_h,
        qwen3_5,
        qwen3_next,
        recurrent_gemma,
        rwkv,
        rwkv7,
        t5,
        zamba2,
    )
    from hybridmem.models.hf.attach import ATTACHABLE, Attached, attach
    from hybridmem.models.hf.cache import HybridCache

_OF_TRANSFORMERS = {"ATTACHABLE": "attach", "Attached": "attach", "HybridCache": "cache", "attach": "attach"}

__all__ = [
    "ARCHITECTURES",
    "ATTACHABLE",
    "EMBEDDED",
    "Attached",
    "Checkpoint",
    "HybridCache",
    "LanguageModel",
    "UnsupportedModelError",
    "attach",
    "bamba",
    "bart",
    "deepseek",
    "falcon_h1",
    "from_transformers",
    "gemma",
    "granite_moe_hybrid",
    "jamba",
    "lfm2",
    "llama",
    "load_model",
    "mamba",
    "nemotron_h",
    "plan_memory",
    "qwen3_5",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "rwkv7",
    "t5",
    "weight_bytes",
    "zamba2",
]


def __getattr__(name: str) -> Any:
    if name in _OF_TRANSFORMERS:
        return getattr(import_module(f"hybridmem.models.hf.{_OF_TRANSFORMERS[name]}"), name)
    if name in __all__:
        return import_module(f"hybridmem.models.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
