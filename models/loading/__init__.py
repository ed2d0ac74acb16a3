"""Loads models: reads checkpoints and configs, and finds the class of an architecture."""

from models.loading.architectures import ARCHITECTURES, LanguageModel, ModelClass, register
from models.loading.load import (
    EMBEDDED,
    ForwardT,
    build,
    check_is_of_transformers,
    check_source,
    dry_model,
    find_adapter,
    find_config,
    find_folder,
    from_transformers,
    load_model,
    on_step,
    plan_memory,
    read_config,
    weight_bytes,
)

__all__ = [
    "ARCHITECTURES",
    "EMBEDDED",
    "ForwardT",
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
    "on_step",
    "plan_memory",
    "read_config",
    "register",
    "weight_bytes",
]
