"""Adapts llama.cpp's contexts to the conformance kit, through llama-cpp-python's low-level functions."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import JambaConfig, LlamaConfig, Mamba2Config, PreTrainedConfig

from hybridmem.memory.testing.adapter import AbsentError, Adapter, Agreement, Logits, RefusedError

_MOST_SEQUENCES, _CONTEXT = 32, 8192
_COMMON: dict[str, Any] = {"vocab_size": 160, "hidden_size": 64, "tie_word_embeddings": True}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        **_COMMON, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
    ),
    "jamba": JambaConfig(
        **_COMMON, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
        intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, mamba_dt_rank=32,
    ),
    "mamba2": Mamba2Config(
        **_COMMON, num_hidden_layers=3, state_size=32, num_heads=4, head_dim=32, n_groups=1, expand=2, chunk_size=16
    ),
}  # fmt: skip


@cache
def _load(name: str) -> Any:
    """Return a model of llama.cpp. Its GGUF file is temporary, and removed after loading."""
    import llama_cpp

    from tests.models.checkpoints import write_checkpoint
    from tests.models.gguf_files import write_gguf

    llama_cpp.llama_log_set(_drop_log, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = write_gguf(write_checkpoint(Path(folder), CONFIGS[name]), Path(folder) / "model.gguf")
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        return llama_cpp.llama_model_load_from_file(str(path).encode(), options)


class LlamaCppAdapter(Adapter):
    """Holds the sequences of one context. Each sequence has an id, and all sequences of a request are in one batch.

    Args:
        copies_back: go back by copying the part of a sequence that stays, `llama_memory_seq_cp` with an end, instead of
            removing the other part.
    """

    agreement = Agreement(rounding=1e-4)

    def __init__(self, name: str, *, copies_back: bool = False) -> None:
        import llama_cpp

        self._llama, self._copies_back = llama_cpp, copies_back
        self.vocab_size = CONFIGS[name].vocab_size
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_outputs_max = _CONTEXT
        options.n_ubatch, options.n_seq_max = 512, _MOST_SEQUENCES
        options.kv_unified = True
        options.n_threads = options.n_threads_batch = 1
        options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
        options.flash_attn_type = 0
        self._context = llama_cpp.llama_init_from_model(_load(name), options)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(_CONTEXT, 0, 1)
        self._lengths: dict[int, int] = {}
        self._texts: dict[int, list[int]] = {}

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._llama.llama_batch_free(self._batch)
            self._llama.llama_free(self._context)

    def open(self) -> int:
        free = set(range(_MOST_SEQUENCES)) - self._lengths.keys()
        if not free:
            raise RefusedError(f"a context has {_MOST_SEQUENCES} sequences")
        self._lengths[min(free)] = 0
        self._texts[min(free)] = []
        return min(free)

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        if fail_after is not None:
            raise AbsentError("a layer of llama.cpp cannot be made to fail from outside")
        rows = [(s, t, self._lengths[s] + i) for s, tokens in requests.items() for i, t in enumerate(tokens)]
        self._batch.n_tokens = len(rows)
        for i, (sequence, token, position) in enumerate(rows):
            self._batch.token[i], self._batch.pos[i], self._batch.n_seq_id[i] = token, position, 1
            self._batch.seq_id[i][0], self._batch.logits[i] = sequence, 1
        if code := self._llama.llama_decode(self._context, self._batch):
            raise RefusedError(f"llama_decode returned {code}")
        pointer = self._llama.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, (len(rows), self.vocab_size)).copy()
        for sequence, tokens in requests.items():
            self._lengths[sequence] += len(tokens)
            self._texts[sequence] += tokens
        return np.split(logits, np.cumsum([len(tokens) for tokens in requests.values()])[:-1])

    def close(self, sequence: Any) -> None:
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        del self._lengths[sequence], self._texts[sequence]

    def length(self, sequence: Any) -> int:
        return int(self._llama.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def rollback(self, sequence: Any, to: int) -> None:
        if not 0 <= to <= self._lengths[sequence]:
            raise RefusedError(f"{to} is no position")
        if self._copies_back and to:
            spare = self.open()
            self._llama.llama_memory_seq_cp(self._memory, sequence, spare, 0, to)
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self._llama.llama_memory_seq_cp(self._memory, spare, sequence, -1, -1)
            self.close(spare)
        elif not self._llama.llama_memory_seq_rm(self._memory, sequence, to if to else -1, -1):
            raise RefusedError("llama_memory_seq_rm returned false")
        self._lengths[sequence] = to
        del self._texts[sequence][to:]

    def fork(self, sequence: Any) -> int:
        fork = self.open()
        self._llama.llama_memory_seq_cp(self._memory, sequence, fork, -1, -1)
        self._lengths[fork], self._texts[fork] = self._lengths[sequence], list(self._texts[sequence])
        return fork

    def save(self, sequence: Any, path: Path) -> None:
        tokens = self._texts[sequence]
        array = (ctypes.c_int32 * max(1, len(tokens)))(*tokens)
        if not self._llama.llama_state_seq_save_file(self._context, str(path).encode(), sequence, array, len(tokens)):
            raise RefusedError("llama_state_seq_save_file wrote nothing")

    def load(self, path: Path) -> int:
        sequence = self.open()
        array, count = (ctypes.c_int32 * _CONTEXT)(), ctypes.c_size_t()
        load = self._llama.llama_state_seq_load_file
        if not load(self._context, str(path).encode(), sequence, array, _CONTEXT, ctypes.byref(count)):
            self.close(sequence)
            raise RefusedError("llama_state_seq_load_file read nothing")
        self._texts[sequence] = list(array[: count.value])
        self._lengths[sequence] = count.value
        return sequence


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _drop_log(level: int, text: bytes, data: object) -> None:
    """Discard a message of llama.cpp's log, because the table already shows what llama.cpp refuses."""


SUBJECTS = {
    "llama": partial(LlamaCppAdapter, "llama"),
    "jamba": partial(LlamaCppAdapter, "jamba"),
    "jamba, back by a partial copy": partial(LlamaCppAdapter, "jamba", copies_back=True),
    "mamba2": partial(LlamaCppAdapter, "mamba2"),
}
"""What the table has: attention alone, and recurrent layers."""
