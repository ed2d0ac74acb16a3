"""Measures training through the memory: peak memory of long texts, and time of a tree of continuations.

`python -m benchmarks.gradients tape 65536` is one row of the table of memory, in a process of its own.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import JambaConfig, JambaForCausalLM

from benchmarks.harness import Report, interleave
from hybridmem.memory.training import Branch, Tape
from hybridmem.models import Trainable

MIB = 1 << 20
CHUNK_TOKENS = 1024
N_PROMPT, N_BRANCHES, N_CONTINUATION = 4096, 64, 128
PLAIN = "transformers"


def make_model() -> Any:
    """Make a random Jamba of three Mamba layers and one of attention."""
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, attn_layer_period=4, attn_layer_offset=2, num_experts=1, num_experts_per_tok=1,
        mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4, use_associative_scan=False,
    )  # fmt: skip
    return JambaForCausalLM(config)


def gradients(*, quick: bool) -> Report:
    """Measure training through the memory: peak memory of long texts, and a tree against separate sequences.

    The memory is that of a process, less what it has before the text: weights, libraries, and one short text.
    """
    report = Report("gradients")
    _memory(report, (2048, 4096) if quick else (4096, 16384, 65536), (1024, 2048) if quick else (1024, 2048, 4096))
    _tree(report, n_rounds=1 if quick else 3, n_branches=16 if quick else N_BRANCHES)
    return report


def _memory(report: Report, lengths: tuple[int, ...], plain_lengths: tuple[int, ...]) -> None:
    plain = {n: _peak_of(PLAIN, n) for n in plain_lengths}
    slope = plain[plain_lengths[-1]] / plain_lengths[-1]
    for n_tokens in lengths:
        peak, boundaries = _peak_of("tape", n_tokens), boundary_bytes(n_tokens)
        measured = plain.get(n_tokens)
        report.add(f"peak memory, chunks of {CHUNK_TOKENS:,} tokens", {
            "tokens": n_tokens, "tape, MiB": peak / MIB, "of these for boundaries, MiB": boundaries / MIB,
            "the rest, MiB": (peak - boundaries) / MIB,
            "plain autograd, MiB": (measured or slope * n_tokens) / MIB,
            "plain autograd is": "measured" if measured else f"that of {plain_lengths[-1]:,} tokens, in proportion",
        })  # fmt: skip
    report.notes.append(
        "Boundaries are rows of keys and values with their gradients, and the states after each chunk with theirs. "
        "Plain autograd is transformers' model over the whole text; longer texts are given in proportion to the "
        "longest that was measured. In both, freed tensors of 64 KiB and more go back to the system at once "
        "(MALLOC_MMAP_THRESHOLD_=65536), so that the peak counts what is in use, not holes in glibc's heap."
    )


def boundary_bytes(n_tokens: int) -> int:
    """Return the bytes of rows, states and their gradients that are kept between the chunks of such a text."""
    spec = Trainable.of(make_model()).model().memory_spec
    total = 0
    for memories in spec.layers:
        for memory in memories:
            if hasattr(memory, "states"):
                n_numbers = sum(torch.Size(state.shape).numel() for state in memory.states)
                total += 2 * 4 * n_numbers * (n_tokens // CHUNK_TOKENS)
            else:
                total += 2 * 4 * 2 * memory.n_kv_heads * memory.head_dim * n_tokens  # type: ignore[union-attr]
    return total


def _peak_of(kind: str, n_tokens: int) -> int:
    """Return the most bytes that a forward and backward over a text take, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gradients", kind, str(n_tokens)]
    environment = os.environ | dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "65536")
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def train(kind: str, n_tokens: int) -> None:
    """Run one forward and backward over a text of random tokens."""
    tokens = torch.randint(0, 256, (n_tokens,), generator=torch.Generator().manual_seed(1)).tolist()
    model = make_model()
    if kind == PLAIN:
        ids = torch.tensor([tokens])
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
    else:
        tape = Tape(Trainable.of(model).model(), chunk_tokens=CHUNK_TOKENS)
        text = tape.open()
        loss = -tape.run({text: tokens})[text].mean()
    loss.backward()  # type: ignore[no-untyped-call]


def _tree(report: Report, n_rounds: int, n_branches: int) -> None:
    """Time one tree, and two of the separate sequences, whose time stands for all of them."""
    trainable, n_timed = Trainable.of(make_model()), 2
    generator = torch.Generator().manual_seed(2)
    prompt = torch.randint(0, 256, (N_PROMPT,), generator=generator).tolist()
    ends = torch.randint(0, 256, (n_branches, N_CONTINUATION), generator=generator).tolist()

    def loss_of(tape: Tape, requests: dict[Branch, list[int]]) -> None:
        values = tape.run(requests)
        (-torch.stack([*values.values()]).mean()).backward()  # type: ignore[no-untyped-call]

    def tree() -> None:
        tape = Tape(trainable.model(), chunk_tokens=CHUNK_TOKENS)
        root = tape.open()
        tape.feed({root: prompt})
        loss_of(tape, {tape.fork(root): end for end in ends})

    def separate() -> None:
        for end in ends[:n_timed]:
            tape = Tape(trainable.model(), chunk_tokens=CHUNK_TOKENS)
            text = tape.open()
            tape.feed({text: prompt})
            loss_of(tape, {text: end})

    samples = interleave({"tree": tree, "separate": separate}, n_rounds)
    unique, total = N_PROMPT + n_branches * N_CONTINUATION, n_branches * (N_PROMPT + N_CONTINUATION)
    own, others = samples["tree"].median_ms / 1e3, samples["separate"].median_ms / 1e3 * n_branches / n_timed
    report.add(f"{n_branches} continuations of {N_CONTINUATION} tokens behind a prompt of {N_PROMPT:,}", {
        "tree, s": own, "separate sequences, s": others, "tree / separate": own / others,
        "unique / all tokens": unique / total, "of the ideal": own / others * total / unique,
    })  # fmt: skip
    report.notes.append(
        f"Separate sequences were timed for {n_timed} of {n_branches}. Both are medians of {n_rounds} rounds."
    )


def main() -> None:
    """Print the peak of one row of the table of memory, in bytes."""
    kind, n_tokens = sys.argv[1], int(sys.argv[2])
    train(kind, 64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train(kind, n_tokens)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


if __name__ == "__main__":
    main()
