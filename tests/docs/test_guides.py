"""What the guides add does what is promised of it.

The test of all pages already runs their code.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.memory import HybridMemory, MemorySpec, Recurrence, RecurrentSpec
from hybridmem.memory.recurrences import FAMILIES
from hybridmem.memory.recurrences.registry import Family
from hybridmem.memory.testing import HybridAdapter, check
from hybridmem.memory.testing.toys import FamilyToy
from hybridmem.models import ATTACHABLE
from tests.docs.pages import ROOT, read_blocks
from tests.extent import only_in_long
from tests.inside import kept_positions


def code_of(guide: str) -> list[str]:
    """Return the Python blocks of a guide, in order."""
    return [block.code for block in read_blocks(ROOT / "docs" / "how-to" / guide) if block.language == "python"]


@only_in_long
def test_the_fast_recurrence_of_the_guide_keeps_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guide's own code checks the slow recurrence."""
    module = ModuleType("ema")
    monkeypatch.setitem(sys.modules, "ema", module)
    slow, _, _, fast = code_of("adding-a-recurrence.md")
    exec(slow, module.__dict__)
    del FAMILIES["ema"]
    exec(fast, module.__dict__)
    family = Family(
        "ema", lambda generator: (module.ema_spec(5), module.FastEMA(torch.rand(5, generator=generator))), True
    )
    results = list(check(lambda: HybridAdapter(FamilyToy(family), same_bits=True), n_examples=1))
    assert [result.why for result in results if result.verdict != "passed"] == []


def test_both_recurrences_of_the_guide_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, _, _, fast = code_of("adding-a-recurrence.md")
    module = ModuleType("ema")
    monkeypatch.setitem(sys.modules, "ema", module)
    exec(slow, module.__dict__)
    del FAMILIES["ema"]
    exec(fast, module.__dict__)
    spec, keep, rows = module.ema_spec(5), torch.rand(5), torch.randn(15, 5)
    found = [run_recurrence(spec, recurrence(keep), rows) for recurrence in (module.EMA, module.FastEMA)]
    assert torch.allclose(*found, atol=1e-5) and found[0].std() > 0.1


def run_recurrence(spec: RecurrentSpec, recurrence: Recurrence, rows: Tensor) -> Tensor:
    memory = HybridMemory(MemorySpec(((spec,),), vocab_size=8), "1MiB")
    with memory.step({memory.open(): [1] * len(rows)}, outputs="all") as step:
        return step.recur(0, rows, recurrence)


@only_in_long
def test_the_policy_of_the_guide_evicts() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for code in code_of("adding-a-policy.md"):
        exec(code, names)
    kept = kept_positions(names["memory"], names["memory"].sequences[0])
    assert kept.shape[0] == 64 and kept[:4, 0].tolist() == [0, 1, 2, 3], kept
    assert not torch.equal(kept[:, 0], torch.arange(64))


def test_the_plan_of_the_guide_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = re.search(
        r"```console\n\$ hybrid-memory (.*?)\n(.*?)```", (ROOT / "docs" / "how-to" / "plan.md").read_text(), re.DOTALL
    )
    assert block is not None
    shutil.copy(ROOT / "tests" / "data" / "configs" / "jamba-1.5-mini.json", tmp_path / "config.json")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, block[1].split())
    assert result.exit_code == 0, result.output
    assert [line.rstrip() for line in result.stdout.splitlines()] == block[2].splitlines()


def test_the_how_to_on_transformers_runs() -> None:
    """Its blocks run one after the other, as one script."""
    names: dict[str, Any] = {}
    for block in code_of("transformers.md"):
        exec(compile(block, "transformers.md", "exec"), names)
    assert names["memory"].usage().used_bytes == 0
    names["memory"].check()
    said, drafted = names["said"], names["drafted"]
    assert said.tolist() == drafted.tolist() and "Milo" in names["tokenizer"].decode(said[0])
    assert names["logits"].shape == (1, names["hf_model"].config.vocab_size)
    page = (ROOT / "docs" / "how-to" / "transformers.md").read_text()
    assert all(f"{name.removesuffix('ForCausalLM')}" in page for name in ATTACHABLE)
