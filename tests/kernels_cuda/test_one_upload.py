"""A step's plan is uploaded in one copy when the step is entered.

The host waits for nothing in it, whatever the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridmem.memory import AttentionSpec, HybridMemory, MemorySpec, Step
from hybridmem.memory.blocks import staging as uploads
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.staging import Stage
from hybridmem.memory.eviction import Quest
from hybridmem.memory.recurrences import FAMILIES
from tests.kernels_cuda.recorder import never_waiting
from tests.subjects import POLICIES, STORAGES, Subject
from tests.toy import VOCAB, FamilyToy, Toy

HEADS = (2, 1, 4)
QUEST = Quest(8, recent=1, select_up_to=4)
ATTENTION = {
    **dict.fromkeys(("dense", "window"), (None, None)),
    "quest": (QUEST, None),
    "quest of 4 bits": (replace(QUEST, budget_tokens=16), STORAGES["4-bit"]),
    **{name: (POLICIES[name], None) for name in ("h2o", "tova", "expected")},
    "h2o of 8 bits": (POLICIES["h2o"], STORAGES["8-bit"]),
    **{name: (None, storage) for name, storage in STORAGES.items()},
}
RECURRENCES = ("rg_lru replay", "rwkv4 keep", "token_shift defer", "short_conv keep", "mamba1 defer")


class OneAttention:
    """Returns as its output what it has read."""

    def __init__(self, window: int | None) -> None:
        (n_heads, n_kv_heads, head_dim), generator = HEADS, torch.Generator().manual_seed(1)
        self.memory_spec = MemorySpec(((AttentionSpec(*HEADS, window=window),),), VOCAB)
        self._q, self._k, self._v = (
            torch.randn(VOCAB, n, head_dim, generator=generator) for n in (n_heads, n_kv_heads, n_kv_heads)
        )

    def __call__(self, step: Step) -> Tensor:
        return step.select(
            step.attend(0, *(weights[step.token_ids] for weights in (self._q, self._k, self._v))).flatten(1)
        )


def subjects() -> Iterator[Subject]:
    for name, (policy, storage) in ATTENTION.items():
        model = OneAttention(5 if name == "window" else None)
        yield Subject(name, "keep", model, is_exact=False, policy=policy, storage=storage)  # type: ignore[arg-type]
    for fold in ("keep", "replay"):
        yield Subject(f"plain torch {fold}", fold, Toy(attention=False), is_exact=False)  # type: ignore[arg-type]
    for name in RECURRENCES:
        family, fold = name.split()
        yield Subject(name, fold, FamilyToy(FAMILIES[family]), is_exact=False)  # type: ignore[arg-type]


class Uploads:
    """Counts copies of plans. Any other upload is an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_sent = 0
        send, upload = Stage.send, uploads._upload_alone

        def count(stage: Stage) -> None:
            self.n_sent += 1
            send(stage)

        def upload_in_time(array: Int64s, device: torch.device) -> Tensor:
            assert uploads._open_stage.get() is not None, f"{array.shape} goes up after the plan"
            return upload(array, device)

        monkeypatch.setattr(Stage, "send", count)
        monkeypatch.setattr(uploads, "_upload_alone", upload_in_time)


def outputs(subject: Subject, *, host_pages: bool, watched: Uploads | None) -> Tensor:
    """Return outputs of ragged prompts that fold meanwhile, of single tokens until bodies have moved, and of drafts.

    A fork and a step of everything together follow.
    """
    options: dict[str, Any] = {"host_pages": "1MiB"} if host_pages else {}
    memory = HybridMemory(
        subject.spec, "4MiB", rollback_window=3, page_tokens=4, fold=subject.fold, poison=True, **options
    )
    a, b = memory.open(), memory.open()
    if host_pages:
        memory.to_host(b)
    tokens, logits = subject.tokens(40), []

    def feed(counts: dict[Any, int]) -> None:
        n_sent = 0 if watched is None else watched.n_sent
        with memory.step({s: tokens[i : i + n] for i, (s, n) in enumerate(counts.items())}, outputs="all") as step:
            if watched is None:
                logits.append(subject.model(step))
                return
            assert watched.n_sent == n_sent + 1
            with never_waiting():
                logits.append(subject.model(step))
        memory.check()
        assert watched.n_sent == n_sent + 1

    feed({a: 18, b: 6})
    feed({b: 1, a: 1})
    feed({a: 3, b: 3})
    memory.rollback(a, to=a.length - 2)
    c = memory.fork(a)
    feed({c: 2, a: 1, b: 7})
    return torch.cat(logits)


CASES = [pytest.param(subject, False, id=subject.name) for subject in subjects()]
CASES += [pytest.param(s, True, id=f"{s.name}, near and far") for s in subjects() if s.name in ("dense", "h2o")]


@pytest.mark.parametrize(("subject", "host_pages"), CASES)
def test_a_plan_goes_up_in_one_copy(
    device: torch.device, subject: Subject, host_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("the toys live on the CPU; tests/gpu counts on the device")
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    expected = outputs(subject, host_pages=host_pages, watched=None)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "triton")
    subject.assert_same(outputs(subject, host_pages=host_pages, watched=Uploads(monkeypatch)), expected)
