"""Runs GGUF models in llama.cpp, through the low-level functions of the llama-cpp-python package.

llama.cpp gets a process of its own. In a common process, each library would find AMX's tile registers as the other left
them, so that llama.cpp dies of an illegal instruction, and both would share one pool of threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import typer

MOST_AT_ONCE = 512
"""Tokens that llama.cpp computes at once: its own default."""

_LOG: list[str] = []
"""What llama.cpp wrote."""


def require_llamacpp() -> None:
    """Exit with a message if the package is not installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        typer.echo(
            "this benchmark needs llama-cpp-python, which is not installed, so nothing is measured; compile it for "
            'this processor with: CMAKE_ARGS="-DGGML_NATIVE=ON" pip install -c constraints.txt -e ".[dev,llamacpp]"',
            err=True,
        )
        raise typer.Exit(1)


def time_calls(call: Callable[[], object], n_untimed: int, n_timed: int) -> list[float]:
    """Return the seconds of each of `n_timed` calls, after `n_untimed` calls that are not timed."""
    seconds = []
    for i in range(n_untimed + n_timed):
        started = time.perf_counter()
        call()
        if i >= n_untimed:
            seconds.append(time.perf_counter() - started)
    return seconds


class LlamaCpp:
    """Holds sequences of one context of llama.cpp, which are prefilled or stepped together in one batch.

    It decodes greedily and computes only the last logits, as `Ours` does.

    Args:
        n_context: the most tokens that a sequence may have.
        keys: the type of keys and values, "F32" or "F16".
        n_threads: the number of threads, for single tokens and for prompts.
        flash_attention: whether attention is one operation, which rounds keys and values in F32 to F16.
    """

    def __init__(
        self, path: Path, n_sequences: int, n_context: int, *, keys: str, n_threads: int, flash_attention: bool = True
    ) -> None:
        import llama_cpp

        self._llama, self._lengths = llama_cpp, [0] * n_sequences
        self.next = [5] * n_sequences
        llama_cpp.llama_log_set(_write_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp does not load {path}: {''.join(_LOG[-8:])}")
        n_tokens = n_sequences * n_context
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = options.n_batch = n_tokens
        options.n_ubatch = min(n_tokens, MOST_AT_ONCE)
        options.n_seq_max = options.n_outputs_max = n_sequences
        options.n_threads = options.n_threads_batch = n_threads
        options.type_k = options.type_v = {"F32": llama_cpp.GGML_TYPE_F32, "F16": llama_cpp.GGML_TYPE_F16}[keys]
        if not flash_attention:
            options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.no_perf = True
        self._context = llama_cpp.llama_init_from_model(model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {n_sequences} x {n_context}: {''.join(_LOG[-8:])}")
        self._n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)

    def describe(self) -> str:
        """Return the version of the package, and the processor's features that llama.cpp uses."""
        features = self._llama.llama_print_system_info().decode().split("|")
        used = [name.split(":")[-1].strip().removesuffix(" = 1") for name in features if name.strip().endswith("= 1")]
        return f"llama-cpp-python {self._llama.__version__} ({', '.join(used)})"

    def prefill(self, tokens: np.ndarray) -> None:
        """Forget everything, and feed prompts of the same length."""
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        self._lengths = [0] * len(tokens)
        self._feed(tokens)

    def decode(self) -> None:
        self._feed(np.array(self.next)[:, None])

    def logits(self) -> np.ndarray:
        """Return the last logits, (sequences, vocab). The array belongs to llama.cpp, and the next call changes it."""
        rows = self._llama.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (len(self._lengths), self._n_vocab))

    def _feed(self, tokens: np.ndarray) -> None:
        """Feed (sequences, tokens) and choose the tokens with the largest logits."""
        n_sequences, n_tokens = tokens.shape
        batch, n_all = self._batch, tokens.size
        batch.n_tokens = n_all
        _view(batch.token, n_all)[:] = tokens.ravel()
        positions = np.array(self._lengths)[:, None] + np.arange(n_tokens)
        _view(batch.pos, n_all)[:] = positions.ravel()
        _view(batch.n_seq_id, n_all)[:] = 1
        for i in range(n_all):
            batch.seq_id[i][0] = i // n_tokens
        _view(batch.logits, n_all)[:] = np.arange(n_all) % n_tokens == n_tokens - 1
        if code := self._llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode of {n_sequences} x {n_tokens} returned {code}: {''.join(_LOG[-8:])}")
        self._lengths = [length + n_tokens for length in self._lengths]
        self.next = self.logits().argmax(-1).tolist()


def _view(pointer: Any, n: int) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, (n,))


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _write_log(level: int, text: bytes, data: object) -> None:
    _LOG.append(text.decode(errors="replace"))


class LlamaProcess:
    """Passes calls on to a `LlamaCpp` in another process, which measures their time itself and sleeps between calls."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self._receive()

    def describe(self) -> str:
        found: str = self._call("describe")
        return found

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Feed prompts and return the last logits, (sequences, vocab)."""
        self._call("prefill", tokens)
        return self._logits()

    def decode(self) -> np.ndarray:
        """Feed the tokens with the largest logits, and return the next logits."""
        self._call("decode")
        return self._logits()

    def time(self, name: str, n_untimed: int, n_timed: int, *arguments: object) -> list[float]:
        """Return the seconds of each timed call of "prefill" or "decode"."""
        found: list[float] = self._call("time", name, n_untimed, n_timed, *arguments)
        return found

    def _logits(self) -> np.ndarray:
        found: np.ndarray = self._call("logits")
        return found

    def _call(self, *call: object) -> Any:
        self._pipe.send(call)
        return self._receive()

    def _receive(self) -> Any:
        try:
            result = self._pipe.recv()
        except EOFError as error:
            self._process.join()
            code = self._process.exitcode
            name = signal.Signals(-code).name if code < 0 else f"code {code}"
            raise RuntimeError(
                f"the process with llama.cpp ended with {name}. Its products for AMX end so in recurrent layers, and "
                "wherever GCC before 12.4 or 13.3 compiled them; compile it without them, CFLAGS=-U__AMX_INT8__ "
                'CXXFLAGS=-U__AMX_INT8__ CMAKE_ARGS="-DGGML_NATIVE=ON"'
            ) from error
        if isinstance(result, Exception):
            raise result
        return result


@contextmanager
def start_llamacpp(
    path: Path, n_sequences: int, n_context: int, *, keys: str, n_threads: int, flash_attention: bool = True
) -> Iterator[LlamaProcess]:
    """Yield llama.cpp with a model, in a process that is ended afterwards. Arguments are those of `LlamaCpp`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    options = {"keys": keys, "n_threads": n_threads, "flash_attention": flash_attention}
    process = context.Process(target=_serve, args=(theirs, (path, n_sequences, n_context), options), daemon=True)
    process.start()
    theirs.close()
    try:
        yield LlamaProcess(process, ours)
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Answer calls until the other end of the pipe is closed; an exception is sent back as the answer."""
    try:
        peer = LlamaCpp(*arguments, **options)
    except RuntimeError as error:
        pipe.send(error)
        return
    pipe.send(None)
    while True:
        try:
            name, *rest = pipe.recv()
        except EOFError:
            return
        try:
            if name == "time":
                timed, n_untimed, n_timed, *rest = rest
                result: object = time_calls(lambda: getattr(peer, timed)(*rest), n_untimed, n_timed)  # noqa: B023
            else:
                result = getattr(peer, name)(*rest)
        except RuntimeError as error:
            result = error
        pipe.send(result)
