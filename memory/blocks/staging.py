"""Uploads the host arrays of a step's plan to the device in one copy, and downloads numbers from the device.

The copy is made from pinned memory, so the host never waits for the device. The device makes the copy after all kernels
that were launched before it.

All plans are uploaded to one buffer, one after the other. So if the arrays of two plans have the same shapes, they have
the same addresses. That is why a step can be captured once and replayed for others (`memory.recorded`). Kernels on the
CPU read plans where they are. There, plans are copied to such a buffer only after recordings of steps were asked for.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.blocks.scoped import Scoped

_LEAST_ELEMENTS = 1 << 14
_LEAST_ROOM = 256
"""Page tables on the CPU have room for at least this many pages."""
_WHOLE = 2
"""Arrays begin at multiples of this many elements (16 bytes), because kernels load so many at once."""


def room_for(n: int) -> int:
    """Round a capacity up by at most an eighth or 16, so that nearly equal numbers give the same capacity."""
    step = max(16, (1 << n.bit_length()) // 16)
    return ceil_div(n, step) * step


class Stage:
    """Holds the buffer on a device to which the plans of successive steps are uploaded.

    Attributes:
        layout: a key. Two steps have the same key if all their arrays are at the same addresses. None: a plan was
            larger than the buffer.
    """

    def __init__(self, device: torch.device, stages: Stages) -> None:
        self.device, self._stages = device, weakref.ref(stages)
        self._is_apart, self._own_key = is_apart(device), object()
        self._place = torch.empty(0, dtype=torch.int64, device=device)
        self._used = self._n_elements = 0
        self._is_open = False
        self._sizes: list[tuple[int, ...]] = []

    @property
    def layout(self) -> Hashable | None:
        is_whole = self._n_elements <= len(self._place)
        return (self._own_key, self._place.data_ptr(), *self._sizes) if is_whole else None

    def open(self) -> None:
        """Begin a new plan.

        Kernels launched earlier still read the old plan, because the new one is copied after them.
        """
        if self._n_elements > len(self._place) or not len(self._place):
            self._place = torch.empty(max(_LEAST_ELEMENTS, 2 * self._n_elements), dtype=torch.int64, device=self.device)
        self._sizes.clear()
        self._n_elements = 0
        self._use(self._place)
        self._is_open = True

    def _use(self, place: Tensor) -> None:
        self._on_device, self._used = place, 0
        # Torch does not reuse pinned memory before copies from it are done.
        self._pinned = place
        if self._is_apart:
            self._pinned = torch.empty(len(place), dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self._host = self._pinned.numpy()

    def add(self, array: Int64s, size: int) -> Tensor:
        """Return a tensor that holds a copy of the array after `send`.

        The tensor is flat if `size` is larger than the array.
        """
        end = self._used + size
        if end > len(self._host):
            self.send()
            self._use(torch.empty(max(_LEAST_ELEMENTS, 2 * size), dtype=torch.int64, device=self.device))
            end = size
        self._host[self._used : self._used + array.size] = array.ravel()
        own = self._host[self._used : end]
        placed = self._on_device[self._used : end] if self._is_apart else torch.from_numpy(own)
        self._sizes.append((size,) if size > array.size else array.shape)
        self._used = ceil_div(end, _WHOLE) * _WHOLE
        self._n_elements += size + size % _WHOLE
        return placed if size > array.size else placed.view(array.shape)

    def send(self) -> None:
        """Start the copy of all added arrays to the device."""
        n = min(self._used, len(self._host))
        if n and self._is_apart:
            self._on_device[:n].copy_(self._pinned[:n], non_blocking=True)

    def close(self) -> None:
        """Release the buffer for another plan. If it is closed already, do nothing."""
        if not self._is_open:
            return
        self._is_open = False
        if (stages := self._stages()) is not None:
            stages.idle.append(self)


class Stages:
    """Holds the buffers of a memory's plans, one for each step that is open at the same time.

    Attributes:
        idle: buffers that no step uses.
        are_wanted: True if plans are copied to buffers. At first it is True only for a device with memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.idle: list[Stage] = []
        self.are_wanted = is_apart(device)
        self._recordings: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def take(self) -> Stage | None:
        """Return an idle buffer or a new one, or None if plans are not copied to buffers."""
        if not self.are_wanted:
            return None
        return self.idle.pop() if self.idle else Stage(self._device, self)

    def recordings_of(self, model: object, make: Callable[[], Any]) -> Any:
        """Return the recordings of a model's steps, or None if the model cannot be a weak key.

        `make` creates them at the first call. Recordings contain addresses of this memory, so they end with the memory
        or with the model.
        """
        try:
            found = self._recordings.get(model)
            return self._recordings.setdefault(model, make()) if found is None else found
        except TypeError:
            return None


_APART = {"cuda", "cpu"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cuda"}


def is_apart(device: torch.device) -> bool:
    """True if the device has memory of its own. For Triton's interpreter, the CPU counts as such a device."""
    return device.type in _APART


class Watch(Protocol):
    """Declares an observer of a step that is recorded or captured: it is told what this thread runs in the step.

    Attributes:
        is_open: True while the step is being recorded. An interrupt may leave an observer set after that. Then it is
            ignored.
    """

    @property
    def is_open(self) -> bool: ...

    def refuse(self, why: str) -> None:
        """Remember why the step cannot stand for other steps, or raise StepError."""
        ...

    def note(self, function: Callable[..., object], arguments: tuple[Any, ...], *, sets_up: bool = False) -> None:
        """Remember that a compiled kernel is called. With `sets_up` the call only prepares later ones."""
        ...


_open_stage = Scoped["Stage | None"]("open_stage", None)
_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def in_one_copy(stages: Stages) -> Iterator[Stage | None]:
    """Upload all arrays of the block in one copy at its end. Until then they can be passed on, but not read.

    The caller closes the yielded stage. If the block raises an exception, this function closes it.
    """
    stage = stages.take()
    if stage is None:
        yield None
        return
    stage.open()
    try:
        with _open_stage.set_to(stage):
            yield stage
        stage.send()
    except BaseException:
        stage.close()
        raise


def set_watch(watch: Watch | None) -> None:
    """Set the observer of what this thread runs. None removes it."""
    _watch.set(watch)


def current_watch() -> Watch | None:
    """Return the observer of what this thread runs, or None if no step is recorded."""
    watch = _watch.get()
    return watch if watch is not None and watch.is_open else None


def object_to_replays(why: str) -> None:
    """Tell the observer that the running step cannot stand for other steps.

    Raises StepError while a step is captured in a CUDA graph. On the CPU the step continues.
    """
    if (watch := current_watch()) is not None:
        watch.refuse(why)


def is_placed(device: torch.device) -> bool:
    """True if the step that is being planned may be replayed for other steps.

    Then numbers that differ between steps must be in the plan's arrays.
    """
    return is_apart(device) or _stage_for(device) is not None


def _stage_for(device: torch.device) -> Stage | None:
    """Return the open stage if it is on this device. A GPU step's stage is not used for pages in host memory."""
    stage = _open_stage.get()
    return stage if stage is not None and stage.device.type == device.type else None


class Placed(NamedTuple):
    """Holds an array of a step's plan twice: for the host, and for kernels on the device.

    Attributes:
        host: the int64 array, of any shape.
        device: the same numbers on the device. On the CPU it shares memory with `host`.
    """

    host: Int64s
    device: Tensor

    def part(self, begin: int, end: int) -> Placed:
        """Return views of the elements [begin, end) of the first axis."""
        return Placed(self.host[begin:end], self.device[begin:end])


def upload(array: Int64s, device: torch.device, *, room: bool = False) -> Tensor:
    """Upload an int64 array to the device without waiting. On the CPU the tensor shares memory with the array.

    In a block of `in_one_copy`, the array is added to the open stage. A step that is captured may not upload elsewhere:
    this raises StepError then.

    Args:
        room: rounds the array's capacity up, so that later, slightly larger plans keep the same addresses.
    """
    # A step uploads ten arrays, so the usual cases make few calls.
    stage = _open_stage.get()
    if stage is not None and stage.device.type == device.type:
        return stage.add(array, _capacity(array.size, device) if room else array.size)
    if device.type in _APART:
        return _upload_alone(array, device)
    if _watch.get() is not None:
        object_to_replays("the step makes an array that its plan does not hold")
    return torch.from_numpy(array)


def _upload_alone(array: Int64s, device: torch.device) -> Tensor:
    object_to_replays("a step that is recorded wants to upload what its plan does not hold")
    copied = torch.from_numpy(array.copy())
    return copied.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else copied


def _capacity(size: int, device: torch.device) -> int:
    """Return for how many elements there is room. Kernels of the CPU read no more than the array: it may be large."""
    return room_for(size) if is_apart(device) else max(_LEAST_ROOM, 1 << (size - 1).bit_length())


def on_host(array: Int64s, device: torch.device) -> Int64s:
    """Return a copy of an array that only the host reads.

    If kernels run on the host, the copy is at the address that `upload` would give it.
    """
    if is_apart(device) or (stage := _stage_for(device)) is None:
        return array
    placed: Int64s = stage.add(array, array.size).numpy()
    return placed


def place(array: Int64s, device: torch.device) -> Placed:
    """Upload an array as `upload` does, and also keep the host's array, because the host reads it as well."""
    device_array = upload(array, device)
    return Placed(array if is_apart(device) else device_array.numpy(), device_array)


class Download:
    """Copies numbers (n,) int64 to the host without waiting, though the device may not have computed them yet."""

    def __init__(self, numbers: Tensor) -> None:
        self.on_device = numbers
        is_cuda = numbers.device.type == "cuda"
        self._on_host = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._on_host.copy_(numbers, non_blocking=True)
        self._arrival = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrival is not None:
            self._arrival.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> Int64s:
        """Return the numbers. The host waits for kernels launched before the copy, but not for later ones."""
        if self._arrival is not None:
            self._arrival.synchronize()
        numbers: Int64s = self._on_host.numpy()
        return numbers
