"""Attention reads the rows that an index chooses. The tests say which rows are read, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import (
    AttentionSpec,
    ChosenRows,
    HybridMemory,
    IndexSpec,
    MemorySpec,
    Sequence,
    SpecError,
    Step,
    StepError,
)
from hybridmem.memory.eviction import H2O
from hybridmem.memory.kernels import Scoring, reference
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.rotary import UNROTATED
from tests.tolerances import assert_kernel_close

N_CHOSEN, N_TOKENS = 4, 23
INDEX = IndexSpec(2, 3, N_CHOSEN, rotation=UNROTATED)
SPEC = MemorySpec(((AttentionSpec(6, 2, 4, n_chosen=N_CHOSEN, rotation=UNROTATED), INDEX),), 9)


class Rows:
    """Holds random inputs of a layer for the tokens of one sequence."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = {"q": (6, 4), "k": (2, 4), "v": (2, 4), "index_q": (2, 3), "index_k": (1, 3), "weights": (2,)}
        self.of = {name: torch.randn(N_TOKENS, *size, generator=generator) for name, size in sizes.items()}

    def __getitem__(self, own: slice) -> dict[str, Tensor]:
        return {name: x[own] for name, x in self.of.items()}

    def expected(self, t: int) -> Tensor:
        """Return what token t attends to, computed by loops."""
        products = (self.of["index_k"][: t + 1, 0] @ self.of["index_q"][t].T * 3**-0.5).clamp(min=0)
        best = (products * self.of["weights"][t]).sum(1).argsort(descending=True, stable=True)[:N_CHOSEN].sort().values
        k, v = self.of["k"][best], self.of["v"][best]
        return reference.attend_rows(self.of["q"][t : t + 1], k, v, Scoring(0.5))


def memory(spec: MemorySpec = SPEC, **options: Any) -> HybridMemory:
    return HybridMemory(spec, "1MiB", **({"rollback_window": 4, "page_tokens": 4, "poison": True} | options))


def run(step: Step, inputs: Seq[dict[str, Tensor]]) -> Tensor:
    """Attend for requests that the step has packed in this order."""
    rows = {name: torch.cat([own[name] for own in inputs]) for name in inputs[0]}
    chosen = step.choose(0, rows["index_q"], rows["index_k"], rows["weights"])
    return step.attend(0, rows["q"], rows["k"], rows["v"], chosen=chosen)


def feed(own: HybridMemory, sequence: Sequence, rows: Rows, end: int) -> Tensor:
    begin = sequence.length
    with own.step({sequence: [1] * (end - begin)}) as step:
        return run(step, [rows[begin:end]])


def test_queries_read_the_rows_that_they_choose() -> None:
    own, rows = memory(), Rows(1)
    sequence = own.open()
    found = torch.cat([feed(own, sequence, rows, end) for end in (3, 4, 5, 17, 18, N_TOKENS)])
    for t in range(N_TOKENS):
        assert_kernel_close(found[t : t + 1], rows.expected(t))


def test_a_neighbour_that_reads_everything_changes_no_bit() -> None:
    own, rows, few = memory(), Rows(1), Rows(2)
    long, short, alone = own.open(), own.open(), own.open()
    for sequence in (long, alone):
        feed(own, sequence, rows, 12)
    expected = feed(own, alone, rows, 13)
    with own.step({long: [1], short: [1]}) as step:
        found = run(step, [rows[12:13], few[0:1]])
    assert torch.equal(found[:1], expected)
    assert_kernel_close(found[1:], few.expected(0))


def test_keys_of_the_index_move_with_the_rows_behind_dropped_tokens() -> None:
    own, rows = memory(), Rows(1)
    sequence = own.open()
    feed(own, sequence, rows, 16)
    own.drop(sequence, 2, 7)
    for x in rows.of.values():
        x[2:11] = x[7:16].clone()
        x[11:18] = x[16:].clone()
    own.check()
    assert_kernel_close(feed(own, sequence, rows, 12), rows.expected(11))


@pytest.mark.parametrize("options", [{"window": 8}, {"policy": H2O(32)}, {"storage": Quantized(8)}])
def test_what_hides_or_rounds_rows_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="an index chooses the rows"):
        AttentionSpec(6, 2, 4, n_chosen=N_CHOSEN, **options)


def test_pages_in_host_memory_are_refused() -> None:
    with pytest.raises(SpecError, match="leave host_pages out"):
        memory(host_pages="1MiB")


def test_rows_are_given_to_attention_with_an_index_and_to_no_other() -> None:
    own, rows = memory(), Rows(1)[0:1]
    with pytest.raises(StepError, match="n_chosen"), own.step({own.open(): [1]}) as step:
        step.attend(0, rows["q"], rows["k"], rows["v"])
    plain = memory(MemorySpec(((AttentionSpec(6, 2, 4),),), 9))
    with pytest.raises(StepError, match="nothing to others"), plain.step({plain.open(): [1]}) as step:
        step.attend(0, rows["q"], rows["k"], rows["v"], chosen=ChosenRows(N_CHOSEN, None))


def test_rows_of_another_step_are_refused() -> None:
    own, rows = memory(), Rows(1)
    sequence = own.open()
    feed(own, sequence, rows, 12)
    given = rows[12:13]
    with pytest.raises(StepError, match="another step"), own.step({sequence: [1]}) as step:
        step.choose(0, given["index_q"], given["index_k"], given["weights"])
        step.attend(0, given["q"], given["k"], given["v"], chosen=ChosenRows(N_CHOSEN, None))
    assert sequence.length == 12


def test_weights_have_one_number_for_each_head() -> None:
    own, rows = memory(), Rows(1)[0:1]
    with pytest.raises(StepError, match="one for each head"), own.step({own.open(): [1]}) as step:
        step.choose(0, rows["index_q"], rows["index_k"], rows["weights"][:, :1])
