"""Chooses tile sizes, warps and stages of a kernel: the best that were measured on such a device, or defaults.

Measured choices are in JSON files, one for each compute capability. `cache_file` is written by `python -m benchmarks
tune` on this machine. Choices that it lacks are looked up in `shipped_file`, which the package has for some devices. If
they are not there either, the kernel's default function is called.

A choice depends on the sizes of a layer or of one request, never on the number of requests in a step. So the bits of a
sequence do not depend on other sequences. Files are read once in a process, so that sums keep their order.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

C = TypeVar("C", bound=tuple[int, ...])
"""A NamedTuple of integers: a kernel's choice."""
Key = tuple[str, tuple[int, ...]]
"""A kernel's name, and the sizes for which a choice was measured."""

_LOG = logging.getLogger("hybridmem.memory")
_FORMAT = 1


class Tunable(Generic[C]):
    """Chooses a kernel's options for some sizes.

    Attributes:
        kernel: the kernel's name in files.
        sizes: names of the sizes on which a choice depends.
        default: a function that returns the choice if none was measured.
        allowed: field of a choice -> values that the kernel works with.
    """

    def __init__(
        self, kernel: str, choice: type[C], allowed: dict[str, Container[int]], default: Callable[..., C]
    ) -> None:
        self.kernel, self.default, self.allowed = kernel, default, allowed
        self.sizes = tuple(signature(default).parameters)
        self._choice = choice
        self._instead: Callable[..., C] | None = None

    def __call__(self, device: torch.device, *sizes: int) -> C:
        if self._instead is not None:
            return self._instead(*sizes)
        found: C | None = measured(device).get((self.kernel, sizes))
        return self.default(*sizes) if found is None else found

    def checked(self, values: Mapping[str, object]) -> C:
        """Return the choice with these values.

        Raises:
            ValueError: the kernel does not work with them.
        """
        if values.keys() != self.allowed.keys():
            raise ValueError(f"{self.kernel} chooses {', '.join(self.allowed)}, not {', '.join(map(str, values))}")
        for name, value in values.items():
            if type(value) is not int or value not in self.allowed[name]:
                raise ValueError(f"{self.kernel} cannot have {name} = {value!r}")
        return self._choice(**values)

    @contextmanager
    def instead(self, choose: Callable[..., C]) -> Iterator[None]:
        """Choose by another function inside of the block, to measure or to test. There, sums may have another order."""
        before, self._instead = self._instead, choose
        try:
            yield
        finally:
            self._instead = before


TUNABLES: dict[str, Tunable[Any]] = {}
"""Maps the name of a kernel to its `Tunable`. It is complete once `memory.kernels.cuda` is imported."""


def tunable(kernel: str, choice: type[C], **allowed: Container[int]) -> Callable[[Callable[..., C]], Tunable[C]]:
    """Return a decorator for a function that returns a default choice for sizes.

    The decorated function takes the device as its first argument, and prefers measured choices.
    """

    def wrap(default: Callable[..., C]) -> Tunable[C]:
        TUNABLES[kernel] = made = Tunable(kernel, choice, allowed, default)
        return made

    return wrap


def powers_of_2(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(least.bit_length() - 1, most.bit_length()))


@cache
def measured(device: torch.device) -> dict[Key, Any]:
    """Return the choices measured on devices of this capability. Device and disk are read only once."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {}
    capability = capability_of(device)
    found = read(shipped_file(capability), capability)
    with suppress(RuntimeError):  # The user has no home directory.
        found |= read(cache_file(capability), capability)
    return found


def capability_of(device: torch.device) -> str:
    """Return the compute capability as text, such as sm90 for Hopper."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def shipped_file(capability: str) -> Path:
    return Path(__file__).parent / f"choices_{capability}.json"


def cache_file(capability: str) -> Path:
    """Return the file in the user's cache folder: XDG_CACHE_HOME if that is an absolute path, or ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "hybrid-memory" / f"choices_{capability}.json"


def read(path: Path, capability: str) -> dict[Key, Any]:
    """Read the choices in a file, or none if it does not exist. Faults in it are logged as warnings, never raised."""
    found, refused = dict[Key, Any](), list[str]()
    try:
        content = json.loads(path.read_text())
        if (content["format"], content["capability"]) != (_FORMAT, capability):
            raise ValueError(
                f"it is for {content['capability']!r} in format {content['format']!r}, not for {capability!r} in "
                f"{_FORMAT}"
            )
        for entry in content["choices"]:
            try:
                key, choice = _parse(entry)
                found[key] = choice
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                refused.append(str(error))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _LOG.warning(
            "%s is ignored, kernels choose by themselves: %s; delete it, or run `python -m benchmarks tune`",
            path,
            error,
        )
        return {}
    if refused:
        _LOG.warning("%d of the choices in %s are ignored: %s", len(refused), path, "; ".join(refused[:3]))
    return found


def _parse(entry: dict[str, Any]) -> tuple[Key, Any]:
    kernel, sizes = entry["kernel"], entry["sizes"]
    if kernel not in TUNABLES:
        raise ValueError(f"there is no kernel {kernel!r}")
    made = TUNABLES[kernel]
    if sizes.keys() != set(made.sizes) or not all(type(size) is int for size in sizes.values()):
        raise ValueError(f"{kernel} is chosen for {', '.join(made.sizes)}, not for {sizes!r}")
    return (kernel, tuple(sizes[name] for name in made.sizes)), made.checked(entry["choice"])


def write(path: Path, capability: str, choices: dict[Key, Any], made_on: str) -> None:
    """Write a file that `read` can read, all at once. `made_on` is a note for people."""
    entries = [
        {
            "kernel": kernel,
            "sizes": dict(zip(TUNABLES[kernel].sizes, map(int, sizes), strict=True)),
            "choice": choice._asdict(),
        }
        for (kernel, sizes), choice in sorted(choices.items())
    ]
    lines = ",\n".join("    " + json.dumps(entry) for entry in entries)
    head = json.dumps({"format": _FORMAT, "capability": capability, "made_on": made_on})[1:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(f".{os.getpid()}")
    whole.write_text(f'{{\n  {head},\n  "choices": [\n{lines}\n  ]\n}}\n')
    whole.replace(path)
