"""Lets the n-th allocation, kernel, layer, file call, callback or call of a tokenizer fail, until a call succeeds.

Python tells a profile function of each call of a function, in C and in Python, before it runs. What that function
raises is raised in place of the call, which therefore has done nothing: as if memory or the disk had ended there.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
_LIBRARY = tuple(str(ROOT / "hybridmem" / package) + os.sep for package in ("memory", "models", "chat"))
_KERNELS = str(ROOT / "hybridmem" / "memory" / "kernels") + os.sep
_TOKENIZERS = str(Path(str(find_spec("transformers").origin)).parent / "tokenization")  # type: ignore[union-attr]
_TESTING = str(ROOT / "hybridmem" / "memory" / "testing") + os.sep

_FILE_CALLS = {
    *("open", "write", "read", "readinto", "fsync", "rename", "replace", "truncate", "flush", "mkdir", "stat", "fstat"),
    *("scandir", "listdir", "lseek", "seek", "ftruncate"),
}
"""What may fail on a full or broken disk."""
_TENSORS = {"empty", "zeros", "ones", "cat", "stack", "clone", "index_select", "empty_like", "zeros_like", "full"}
"""Functions of torch that ask for memory."""


class InjectedError(Exception):
    """A kernel, a layer, a callback or a tokenizer raises this."""


@dataclass(frozen=True)
class Kind:
    """Names a kind of failure.

    Attributes:
        matches: whether a call is one that may fail so; of frame, event and argument as `sys.setprofile` has them.
        error: what is raised in its place.
    """

    name: str
    matches: Callable[[FrameType, str, Any], bool]
    error: Callable[[], BaseException]


def _is_in(frame: FrameType | None, *places: str) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(places)


def _allocates(frame: FrameType, event: str, called: Any) -> bool:
    if event != "c_call" or not _is_in(frame, *_LIBRARY) or _is_in(frame, _TESTING):
        return False
    owner = getattr(called, "__self__", None)
    is_torch = isinstance(owner, torch.Tensor | type(torch)) or (getattr(called, "__module__", "") or "") == "torch"
    return is_torch and called.__name__ in _TENSORS


def _calls_kernel(frame: FrameType, event: str, called: Any) -> bool:
    return event == "call" and _is_in(frame, _KERNELS) and not _is_in(frame.f_back, _KERNELS) and _is_in(
        frame.f_back, *_LIBRARY
    )  # fmt: skip


def _calls_layer(frame: FrameType, event: str, called: Any) -> bool:
    code = frame.f_code
    return (
        event == "call" and code.co_name in ("attend", "recur", "cross_attend") and code.co_filename.endswith("step.py")
    )


def _takes_blocks(frame: FrameType, event: str, called: Any) -> bool:
    return event == "call" and frame.f_code.co_name == "allocate_many" and frame.f_code.co_filename.endswith("arena.py")


def _touches_files(frame: FrameType, event: str, called: Any) -> bool:
    if event != "c_call" or called.__name__ not in _FILE_CALLS:
        return False
    owner, module = getattr(called, "__self__", None), getattr(called, "__module__", "")
    return isinstance(owner, io.IOBase) or module in ("posix", "_io", "io") or getattr(owner, "__name__", "") == "posix"


def _calls_back(frame: FrameType, event: str, called: Any) -> bool:
    return event == "call" and frame.f_code.co_name.startswith("callback_")


def _calls_tokenizer(frame: FrameType, event: str, called: Any) -> bool:
    """True if the library calls a tokenizer of transformers or of tokenizers."""
    if event == "call":
        return _is_in(frame.f_back, *_LIBRARY) and frame.f_code.co_filename.startswith(_TOKENIZERS)
    return _is_in(frame, *_LIBRARY) and type(getattr(called, "__self__", None)).__module__.startswith("tokenizers")


def _full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def _no_room() -> BaseException:
    from hybridmem.memory import CapacityError

    return CapacityError.of("an injected failure needs", 1, 0)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("block", _takes_blocks, _no_room),
        Kind("allocation", _allocates, MemoryError),
        Kind("kernel", _calls_kernel, InjectedError),
        Kind("layer", _calls_layer, InjectedError),
        Kind("disk full", _touches_files, _full),
        Kind("disk broken", _touches_files, _broken),
        Kind("callback", _calls_back, InjectedError),
        Kind("tokenizer", _calls_tokenizer, InjectedError),
    )
}


@dataclass
class Outcome:
    """Holds what came of a call: its result, or the error that it raised."""

    result: Any = None
    error: BaseException | None = None
    n_points: int = 0
    places: Counter[str] = field(default_factory=Counter)
    failed_at: str = ""


def call_with(call: Callable[[], Any], kind: Kind, failing: int | None, *, kills: bool = False) -> Outcome:
    """Call, and let the point number `failing` of this kind fail; with None, count the points.

    Args:
        kills: end the process there, as `kill -9` does, instead of raising.
    """
    outcome = Outcome()

    def profile(frame: FrameType, event: str, called: Any) -> None:
        # Torch calls a mode in the middle of any of its functions, even from a callback in C, which cannot raise.
        if frame.f_code.co_name == "__torch_function__" and event == "call":
            return
        if event not in ("call", "c_call") or not kind.matches(frame, event, called):
            return
        outcome.n_points += 1
        if outcome.n_points - 1 == failing:
            outcome.failed_at = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise kind.error()

    sys.setprofile(profile)
    try:
        outcome.result = call()
    except BaseException as error:
        outcome.error = error
    finally:
        sys.setprofile(None)
    return outcome
