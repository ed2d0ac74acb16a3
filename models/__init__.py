"""Models that run on a `HybridMemory`: one short file a family, and loading."""

from models import (
    bamba,
    bart,
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
    zamba2,
)
from models.checkpoint import Checkpoint, UnsupportedModelError
from models.loading import ARCHITECTURES, EMBEDDED, LanguageModel, load_model, plan_memory, weight_bytes

__all__ = [
    "ARCHITECTURES",
    "EMBEDDED",
    "Checkpoint",
    "LanguageModel",
    "UnsupportedModelError",
    "bamba",
    "bart",
    "falcon_h1",
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
    "weight_bytes",
    "zamba2",
]
