"""Tile sizes, warps and stages of a kernel: as they were measured on a device like this one, or by the kernel's own
function.

What was measured lies in files, JSON, one for each compute capability. `cache_file` is what `python -m benchmarks tune`
wrote on this machine; where it says nothing, `shipped_file` counts, which the package brings for some devices; where
that is missing, the default does.

A choice belongs to sizes of a layer or of one request, never to how many requests a step has: a sequence's bits do not
depend on its neighbours. Files are read once in a process, so that sums keep their order.
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
"""A NamedTuple of numbers."""
Key = tuple[str, tuple[int, ...]]
"""A kernel's name, and its sizes."""

_LOG = logging.getLogger("memory")
_FORMAT = 1


class Tunable(Generic[C]):
    """What a kernel chooses for some sizes.

    Attributes:
        kernel: its name in files.
        sizes: names of what a choice is made for.
        default: makes it where nothing was measured.
        allowed: for each field of a choice the values that the kernel works with.
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
        """The choice of these values.

        Raises:
            ValueError: the kernel has no such choice.
        """
        if values.keys() != self.allowed.keys():
            raise ValueError(f"{self.kernel} chooses {', '.join(self.allowed)}, not {', '.join(map(str, values))}")
        for name, value in values.items():
            if type(value) is not int or value not in self.allowed[name]:
                raise ValueError(f"{self.kernel} cannot have {name} = {value!r}")
        return self._choice(**values)

    @contextmanager
    def instead(self, choose: Callable[..., C]) -> Iterator[None]:
        """Another function of sizes chooses inside, to measure or to test what it says: sums may come in another order
        there.
        """
        before, self._instead = self._instead, choose
        try:
            yield
        finally:
            self._instead = before


TUNABLES: dict[str, Tunable[Any]] = {}
"""By kernel; whole once `memory.kernels.cuda` is imported."""


def tunable(kernel: str, choice: type[C], **allowed: Container[int]) -> Callable[[Callable[..., C]], Tunable[C]]:
    """Make a default function, of sizes, one that knows what was measured, and takes the device first."""

    def wrap(default: Callable[..., C]) -> Tunable[C]:
        TUNABLES[kernel] = made = Tunable(kernel, choice, allowed, default)
        return made

    return wrap


def powers_of_2(least: int, most: int) -> tuple[int, ...]:
    return tuple(1 << i for i in range(least.bit_length() - 1, most.bit_length()))


@cache
def measured(device: torch.device) -> dict[Key, Any]:
    """What was measured on devices of this capability. Asks neither the device nor the disk a second time."""
    if device.type != "cuda" or torch.version.cuda is None:
        return {}
    capability = capability_of(device)
    found = read(shipped_file(capability), capability)
    with suppress(RuntimeError):  # nobody's home
        found |= read(cache_file(capability), capability)
    return found


def capability_of(device: torch.device) -> str:
    """Such as sm90, which is Hopper."""
    return "sm{}{}".format(*torch.cuda.get_device_capability(device))


def shipped_file(capability: str) -> Path:
    return Path(__file__).parent / f"choices_{capability}.json"


def cache_file(capability: str) -> Path:
    """In the user's cache folder: XDG_CACHE_HOME if that is a whole path, or ~/.cache."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "hybrid-memory" / f"choices_{capability}.json"


def read(path: Path, capability: str) -> dict[Key, Any]:
    """The choices in a file, none if there is no such file. What is wrong with it is said once, and never raised."""
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
    """A file that `read` reads, whole at any moment. `made_on` is for people."""
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
