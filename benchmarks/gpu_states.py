"""Measures recurrent states on a GPU: decode steps that only read them against steps that also write, and prompts.

Every layer has states of its own and the layers run one after the other, so that no layer finds its states in a cache.
All layers are one CUDA graph, so that the host's time does not count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Report, Samples
from hybridmem.memory.blocks.staging import place
from hybridmem.memory.kernels import Erase, StateSlots, Tail, cuda
from hybridmem.memory.specs import StateTensor, matrix_tensor

N_BYTES = 2 << 30
"""Bytes of all states together: far more than the last-level cache of a GPU holds (60 MB on an H200)."""
TAIL_TOKENS, N_DRAFTS, PROMPT_TOKENS = 24, 4, 4096


@dataclass(frozen=True)
class Layer:
    """Holds the sizes of a recurrent layer of a published model."""

    name: str
    n_heads: int
    n_groups: int
    value_dim: int
    key_dim: int
    erases: bool

    @property
    def state_elements(self) -> int:
        return self.n_heads * self.value_dim * self.key_dim


LAYERS = (
    Layer("SSD, 80 heads of 64 x 128, 1 group", 80, 1, 64, 128, False),
    Layer("gated delta, 32 value heads, 16 key heads, 128 x 128", 32, 16, 128, 128, True),
)


def gpu_states(report: Report, *, quick: bool) -> None:
    """Measure decode steps and prompts of recurrent layers. Needs a CUDA device."""
    copy = copy_gbytes_a_second()
    report.add("copy", {"what": "torch copy of 1 GiB on the device", "GB/s read + written": copy})
    for layer in LAYERS:
        for dtype in (torch.bfloat16, torch.float32):
            for n_sequences in (1, 128) if quick else (1, 32, 128, 256):
                _decode(report, layer, dtype, n_sequences, copy, n_rounds=5 if quick else 20)
    for layer in LAYERS:
        _prompt(report, layer, n_rounds=3 if quick else 10)


def copy_gbytes_a_second() -> float:
    """Return the bandwidth of torch's copy on the device: bytes read and written per second, in 10**9."""
    source = torch.ones(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / time_graph(lambda: target.copy_(source), 10).median_ms / 1e6


def time_graph(run: Callable[[], object], n_rounds: int) -> Samples:
    return time_graphs({"": run}, n_rounds)[""]


def time_graphs(runs: Mapping[str, Callable[[], object]], n_rounds: int) -> dict[str, Samples]:
    """Time replays of a CUDA graph of each function, in turns.

    Each function runs once before it is captured, so that kernels are compiled and arrays uploaded.
    """
    graphs = {name: _capture(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(n_rounds + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                seconds[name].append(begin.elapsed_time(end) / 1e3)
    return {name: Samples(samples) for name, samples in seconds.items()}


def _capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def make_tails(
    state: StateTensor, dtype: torch.dtype, n_layers: int, n_sequences: int, n_tail: int, n_new: int
) -> list[Tail]:
    """Return a tail for each layer: `n_tail` tokens that change the state little, and room for `n_new` tokens."""
    ring_rows, flats, offsets = n_tail + n_new, [], []
    for shape, of in state.ring or ():
        size = ring_rows * math.prod(shape)
        flats.append((torch.rand(n_layers * n_sequences * size, device="cuda") * -0.1).to(of or dtype))
        offsets.append(torch.arange(0, len(flats[-1]), size, device="cuda").view(n_layers, n_sequences))
    numbers = [torch.full((n_sequences,), x, device="cuda") for x in (0, n_tail, 0)]
    return [
        Tail(tuple(flats), tuple(own := [x[i] for x in offsets]), tuple(own), ring_rows, *numbers)  # type: ignore[arg-type]
        for i in range(n_layers)
    ]


class Work:
    """Runs steps of `n_new` tokens a sequence through `n_layers` layers, with and without writing the states.

    Both ways start from the same numbers. If `n_layers` is None, there are as many layers as have `N_BYTES` of states.
    """

    def __init__(
        self, layer: Layer, dtype: torch.dtype, n_sequences: int, n_new: int, n_layers: int | None = None
    ) -> None:
        n, device = n_sequences, torch.device("cuda")
        self.layer = layer
        self.n_sequences = n
        self.n_layers = n_layers or max(1, N_BYTES // (4 * n * layer.state_elements))
        self.shape = (layer.n_heads, layer.value_dim, layer.key_dim)
        self.flat = torch.randn(self.n_layers * n * layer.state_elements, device=device)
        self.cu_rows, n_rows = place(np.arange(n + 1) * n_new, self.flat.device), n * n_new
        self.offsets = torch.arange(0, len(self.flat), layer.state_elements, device=device).view(self.n_layers, n)
        self.q = torch.randn(n_rows, layer.n_groups, layer.key_dim, device=device).to(dtype)
        self.k = F.normalize(torch.randn_like(self.q.float()), dim=-1).to(dtype)
        self.v = torch.randn(n_rows, layer.n_heads, layer.value_dim, device=device).to(dtype)
        self.log_decay, self.strength = (torch.rand(n_rows, layer.n_heads, device=device) * x for x in (-0.1, 1.0))
        self.skip = None if layer.erases else torch.randn(layer.n_heads, device=device)
        self.nowhere = torch.full_like(self.offsets[0], -1)
        state = matrix_tensor(layer.name, layer.n_heads, layer.value_dim, layer.key_dim, layer.n_groups)
        self.tails = make_tails(state, dtype, self.n_layers, n, TAIL_TOKENS, n_new)

    def scan(self, slots: StateSlots) -> Tensor:
        erase = Erase(self.k, None, after_decay=True) if self.layer.erases else None
        return cuda.matrix_scan(
            self.q, self.k, self.v, self.log_decay, erase, slots, strength_TH=self.strength, skip_H=self.skip
        )

    def read(self) -> Tensor:
        """Run all layers without writing states, and return the last layer's output."""
        for offsets, tail in zip(self.offsets, self.tails, strict=True):
            y = self.scan(StateSlots(self.cu_rows, self.flat, offsets, self.nowhere, self.shape, 0.0, tail))
        return y

    def read_and_write(self) -> None:
        for offsets in self.offsets:
            self.scan(StateSlots(self.cu_rows, self.flat, offsets, offsets, self.shape, 0.0))

    def read_and_write_theirs(self, update: Callable[..., Tensor]) -> None:
        """Run all layers by mamba-ssm's `selective_state_update`, with one token a sequence."""
        n, (h, p, s) = self.n_sequences, self.shape
        rate = torch.full((h,), -0.1, device=self.flat.device)[:, None, None].expand(h, p, s)
        skip = None if self.skip is None else self.skip[:, None].expand(h, p)
        for state in self.flat.view(self.n_layers, n, h, p, s):
            update(
                state, self.v, self.strength.to(self.v.dtype)[:, :, None].expand(n, h, p), rate, self.k, self.q, skip
            )

    @property
    def read_bytes(self) -> int:
        """Return the bytes that all layers read: each state once, the tail of each state, and the new rows."""
        layer, width = self.layer, self.v.element_size()
        row = (layer.n_groups * layer.key_dim + layer.n_heads * layer.value_dim) * width + 4 * layer.n_heads
        new = (2 * self.q[0].numel() + self.v[0].numel()) * width + 4 * self.v[0].numel() + row
        each = 4 * layer.state_elements + TAIL_TOKENS * row + new * (len(self.v) // self.n_sequences)
        return self.n_layers * self.n_sequences * each


def _decode(report: Report, layer: Layer, dtype: torch.dtype, n_sequences: int, copy: float, *, n_rounds: int) -> None:
    work = Work(layer, dtype, n_sequences, 1)
    reading, writing = time_graph(work.read, n_rounds), time_graph(work.read_and_write, n_rounds)
    peer, theirs = "ours", writing.median_ms
    update = None if layer.erases else _theirs("mamba_ssm.ops.triton.selective_state_update", "selective_state_update")
    if update is not None:
        peer, theirs = "mamba-ssm", time_graph(lambda: work.read_and_write_theirs(update), n_rounds).median_ms
    n_layers, gbytes = work.n_layers, work.read_bytes / reading.median_ms / 1e6
    drafts = Work(layer, dtype, n_sequences, 1 + N_DRAFTS)
    verifying = time_graph(drafts.read, n_rounds).median_ms / drafts.n_layers
    step = reading.median_ms / n_layers
    report.add(f"a decode step of one layer behind a tail of {TAIL_TOKENS} tokens", {
        "layer": layer.name, "rows": str(dtype).removeprefix("torch."), "sequences": n_sequences,
        "reads, µs": step * 1e3, "GB/s": gbytes, "of the copy": gbytes / copy,
        "reads and writes, µs": writing.median_ms / n_layers * 1e3, "peer": peer, "peer, µs": theirs / n_layers * 1e3,
        "peer / reads": theirs / reading.median_ms, f"{N_DRAFTS} drafts / step": verifying / step,
    })  # fmt: skip


def _prompt(report: Report, layer: Layer, *, n_rounds: int) -> None:
    work = Work(layer, torch.bfloat16, 1, PROMPT_TOKENS, n_layers=1)
    slots = StateSlots(work.cu_rows, work.flat, work.offsets[0], work.offsets[0], work.shape, 0.0)
    ours, peer, theirs = time_graph(lambda: work.scan(slots), n_rounds).median_ms, "-", 0.0
    scan = None if layer.erases else _theirs("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    if scan is not None:
        state = work.flat[: layer.state_elements].view(1, *work.shape)
        rate = torch.full((layer.n_heads,), -0.1, device="cuda")
        x, dt, b, c = (t[None] for t in (work.v, work.strength, work.k, work.q))
        peer = "mamba-ssm"
        theirs = time_graph(
            lambda: scan(x, dt, rate, b, c, 256, D=work.skip, initial_states=state, return_final_states=True), n_rounds
        )
        theirs = theirs.median_ms
    report.add(f"a prompt of {PROMPT_TOKENS} tokens, one layer, bfloat16", {
        "layer": layer.name, "ms": ours, "peer": peer, "peer, ms": theirs, "peer / ours": theirs / ours,
    })  # fmt: skip


def _theirs(module: str, function: str) -> Any:
    """Return a function of another library, or None if that library is not installed."""
    try:
        return getattr(__import__(module, fromlist=[function]), function)
    except ImportError:
        return None
