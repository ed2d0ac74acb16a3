"""Reads models from GGUF files, the format of llama.cpp: their tensors, config and tokenizer."""

from hybridmem.models.loading.gguf.checkpoint import GgufCheckpoint
from hybridmem.models.loading.gguf.configs import read_gguf_config
from hybridmem.models.loading.gguf.file import GgufFile, find_gguf, is_gguf, list_gguf
from hybridmem.models.loading.gguf.tokenizer import load_gguf_tokenizer

__all__ = [
    "GgufCheckpoint",
    "GgufFile",
    "find_gguf",
    "is_gguf",
    "list_gguf",
    "load_gguf_tokenizer",
    "read_gguf_config",
]
