"""Reads models from GGUF files, the format of llama.cpp: their tensors, config and tokenizer."""

from models.loading.gguf.checkpoint import GgufCheckpoint
from models.loading.gguf.configs import read_gguf_config
from models.loading.gguf.file import GgufFile, find_gguf, is_gguf
from models.loading.gguf.tokenizer import load_gguf_tokenizer

__all__ = ["GgufCheckpoint", "GgufFile", "find_gguf", "is_gguf", "load_gguf_tokenizer", "read_gguf_config"]
