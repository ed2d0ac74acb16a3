"""Measures decoding of more sequences than the device holds: with pages in host memory, against swapping.

With pages in host memory all sequences take part in each step, wherever attention to them is computed. With swapping,
some sequences wait while the others decode, and after some steps the two groups change places. Only attention is
measured, because all other parts of a model take the same time either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import Report, Row, interleave
from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Sequence, Step


@dataclass(frozen=True)
class Sizes:
    """Holds the sizes of the model and of the sequences that decode.

    `n_hosted` is how many sequences do not fit the device, and `turn_steps` how many steps there are between two swaps.
    """

    n_sequences: int
    n_hosted: int
    context: int
    turn_steps: int
    n_layers: int = 4
    heads: tuple[int, int, int] = (32, 8, 128)

    @property
    def spec(self) -> MemorySpec:
        return MemorySpec(((AttentionSpec(*self.heads),),) * self.n_layers, vocab_size=2)

    @property
    def sequence_bytes(self) -> int:
        """Return the bytes of a sequence in 16 bits.

        The count has the sequence's keys and values, and the rows that are added while one round is measured.
        """
        _, n_kv_heads, head_dim = self.heads
        return (self.context + self.turn_steps + 64) * n_kv_heads * head_dim * 4 * self.n_layers


class Decoding:
    """Holds a memory full of sequences that decode together."""

    def __init__(self, sizes: Sizes, device: torch.device, *, n_on_device: int, **options: Any) -> None:
        self.sizes, self.device = sizes, device
        budget = (n_on_device + 1) * sizes.sequence_bytes
        self.memory = HybridMemory(
            sizes.spec, budget, dtype=torch.bfloat16, device=device, rollback_window=sizes.turn_steps, **options
        )
        self.sequences: deque[Sequence] = deque()
        self._inputs: dict[int, list[torch.Tensor]] = {}

    def fill(self, n: int, leave: Callable[[Sequence], None] | None = None) -> None:
        """Open `n` more sequences at their context. `leave` then moves each of them off the device."""
        for _ in range(n):
            sequence = self.memory.open()
            with self.memory.step({sequence: [1] * self.sizes.context}) as step:
                self._attend(step)
            if leave is not None:
                leave(sequence)
            self.sequences.append(sequence)

    def decode(self, n_sequences: int) -> None:
        """Decode `turn_steps` steps of the first `n_sequences` sequences, and roll them back to where they were."""
        chosen = [self.sequences[i] for i in range(n_sequences)]
        for _ in range(self.sizes.turn_steps):
            with self.memory.step(dict.fromkeys(chosen, 1)) as step:
                self._attend(step)
        for sequence in chosen:
            self.memory.rollback(sequence, to=self.sizes.context)
        self._wait()

    def take_turns(self) -> None:
        """Decode the sequences that are on the device, then exchange some for those that wait.

        As many of the first sequences are swapped out as wait, and those that waited are swapped in.
        """
        n_waiting = self.sizes.n_hosted
        self.decode(len(self.sequences) - n_waiting)
        for _ in range(n_waiting):
            self.memory.swap_out(self.sequences[0])
            self.sequences.rotate(-1)
        for i in range(n_waiting):
            self.memory.swap_in(self.sequences[len(self.sequences) - 2 * n_waiting + i])
        self._wait()

    def _attend(self, step: Step) -> None:
        n_tokens = len(step.token_ids)
        if n_tokens not in self._inputs:
            n_heads, n_kv_heads, head_dim = self.sizes.heads
            shapes = [(n_tokens, n, head_dim) for n in (n_heads, n_kv_heads, n_kv_heads)]
            self._inputs = {n_tokens: [torch.randn(shape, device=self.device).bfloat16() for shape in shapes]}
        for layer in range(self.sizes.n_layers):
            step.attend(layer, *self._inputs[n_tokens])

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def gpu_host(report: Report, *, quick: bool) -> None:
    """Measure decode steps of sequences that do not all fit the device. Needs a GPU and 16 GiB of host memory."""
    for n_hosted in (4,) if quick else (2, 4, 8, 16):
        sizes = Sizes(n_sequences=32, n_hosted=n_hosted, context=2048 if quick else 8192, turn_steps=16)
        report.add(
            "decode steps of sequences that the device cannot hold all",
            row(sizes, torch.device("cuda"), 3 if quick else 10),
        )


def row(sizes: Sizes, device: torch.device, n_rounds: int) -> Row:
    """Return a row of the table."""
    n_here, n_hosted = sizes.n_sequences - sizes.n_hosted, sizes.n_hosted
    runs: dict[str, Callable[[], None]] = {}
    everything = Decoding(sizes, device, n_on_device=sizes.n_sequences)
    everything.fill(sizes.n_sequences)
    runs["all on the device"] = lambda: everything.decode(sizes.n_sequences)
    for attention in ("stream", "compute"):
        hosted = Decoding(
            sizes,
            device,
            n_on_device=n_here,
            host_pages=(n_hosted + 1) * sizes.sequence_bytes,
            host_attention=attention,
        )
        hosted.fill(n_hosted, hosted.memory.to_host)
        hosted.fill(n_here)
        runs[attention] = lambda hosted=hosted: hosted.decode(sizes.n_sequences)  # type: ignore[misc]
    swapping = Decoding(sizes, device, n_on_device=n_here)
    swapping.fill(n_hosted, swapping.memory.swap_out)
    swapping.fill(n_here)
    swapping.sequences.rotate(-n_hosted)
    runs["swapping"] = swapping.take_turns
    found = interleave(runs, n_rounds)
    rates = {
        name: (n_here if name == "swapping" else sizes.n_sequences) * sizes.turn_steps / samples.median_ms * 1e3
        for name, samples in found.items()
    }
    return {
        "sequences": sizes.n_sequences, "in host memory": n_hosted, "context": sizes.context,
        "steps between swaps": sizes.turn_steps, **{f"{name}, tokens/s": rate for name, rate in rates.items()},
        **{f"{name} / swapping": rates[name] / rates["swapping"] for name in ("stream", "compute")},
    }  # fmt: skip
