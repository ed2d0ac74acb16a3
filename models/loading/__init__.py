"""Loads models: reads checkpoints and configs, and finds the class of an architecture."""

from hybridmem.models.loading.architectures import ARCHITECTURES, LanguageModel, ModelClass, register
from hybridmem.models.loading.folders import EMBEDDED, find_config, find_folder, read_config
from hybridmem.models.loading.load import (
    build,
    check_is_of_transformers,
    check_source,
    dry_model,
    find_adapter,
    from_transformers,
    load_model,
    plan_memory,
    weight_bytes,
)

__all__ = [
    "ARCHITECTURES",
    "EMBEDDED",
    "LanguageModel",
    "ModelClass",
    "build",
    "check_is_of_transformers",
    "check_source",
    "dry_model",
    "find_adapter",
    "find_config",
    "find_folder",
    "from_transformers",
    "load_model",
    "plan_memory",
    "read_config",
    "register",
    "weight_bytes",
]
