"""The README is short and true, and its commands are those that CI runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import torch

from benchmarks import architectures
from hybridmem.memory import SpecError
from hybridmem.memory.capacity import plan_sequence
from hybridmem.models import ARCHITECTURES, plan_memory
from hybridmem.models.loading.architectures import REFUSED
from hybridmem.models.loading.folders import read_config, unsupported
from hybridmem.models.loading.gguf.configs import _ARCHITECTURES
from tests.docs.pages import ROOT, read_blocks, read_prose
from tests.extent import only_in_long

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def test_it_fits_two_screens() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 110 and max(map(len, lines)) <= 140


def test_ci_runs_its_commands() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    commands = [
        line.split("#")[0].strip()
        for block in read_blocks(README)
        if block.language == "bash"
        for line in block.code.splitlines()
    ]
    assert len(commands) == 4
    for command in commands:
        assert command.replace("pip install", "pip install -q") in ci or command in ci


def test_its_lines_of_python_run_in_one_session() -> None:
    """Lines within sentences run after the ten lines, because a reader tries them there."""
    (block,) = (block for block in read_blocks(README) if block.language == "python")
    within = [
        line
        for line in re.findall(r"`([^`\n]+)`", read_prose(README))
        if re.match(r"from \S+ import|[a-z][\w.]*\(.*\)$", line)
    ]
    assert "watch(memory)" in within
    session: dict[str, object] = {}
    for code in (block.code, *within):
        try:
            exec(compile(code, str(README), "exec"), session)
        except SpecError as error:
            assert code == "watch(memory)" and "in a notebook, and this is none" in str(error)


@only_in_long
def test_a_window_costs_what_the_plan_says() -> None:
    """With default options, the cost is a session with a window of 64 less one without a window, in states."""
    (row,) = re.findall(r"^\| bytes that a 64-token window adds, .*? \| (.*?) \|", README.read_text(), re.MULTILINE)
    said = [[float(n) for n in pair] for pair in re.findall(r"([\d.]+) / ([\d.]+)", row)]
    configs = ROOT / "tests" / "data" / "configs"
    for name, shown in zip(("nemotron-h-8b", "qwen3-next-80b-a3b", "jamba-1.5-mini"), said, strict=True):
        config, _ = read_config(configs / f"{name}.json")
        spec = plan_memory(config, config.architectures[0])
        for device, n_states in zip(("cuda", "cpu"), shown, strict=True):
            there = replace(spec, device=torch.device(device))
            with_window, without = (plan_sequence(there, 4096, rollback_window=n) for n in (64, 0))
            found = (with_window.most_bytes - without.most_bytes) / with_window.block_bytes["states"]
            assert abs(found - n_states) <= 0.05, (name, device, found)


@only_in_long
def test_the_table_of_architectures_is_that_of_the_registry() -> None:
    """Update it by `python -m benchmarks parity --out benchmarks/results` and then `python -m benchmarks table`."""
    assert architectures.table_in_docs() == architectures.table()


def test_every_recurrent_class_of_transformers_loads_or_is_refused_with_a_reason() -> None:
    classes = set(architectures.recurrent_classes())
    assert len(classes) > 40
    assert classes - REFUSED.keys() <= set(ARCHITECTURES)
    assert REFUSED.keys() <= classes - set(ARCHITECTURES)
    for name, why in REFUSED.items():
        assert why.rpartition(" loads as ")[2] in ARCHITECTURES, name
        assert f"{name} is not supported, because {why}" in str(unsupported(name))


def test_what_asks_transformers_for_the_mask_of_a_recurrence_is_among_the_recurrent_classes() -> None:
    """By another mark than the one by which they are found."""
    masking = {
        name
        for folder in architectures.folders_of_transformers()
        if "create_recurrent_attention_mask" in architectures.text_of(folder, "modeling")
        for name in architectures.generating_classes(folder)
    }
    assert len(masking) > 20 and masking <= set(architectures.recurrent_classes())


def test_speeds_are_those_that_were_measured_last() -> None:
    """Each cell of the table in docs/results/index.md equals the files of results.

    The README's range is that of its row.
    """
    (speed,) = re.findall(
        r"^## Speed\n(.*?)^## ", (ROOT / "docs/results/index.md").read_text(), re.DOTALL | re.MULTILINE
    )
    table = [line.strip("| ").split(" | ") for line in speed.splitlines() if line.startswith("| ")]
    header, *rows = table
    models = [name.lower().replace("mamba-2", "mamba2").replace("qwen3.5", "qwen3_5") for name in header[1:]]
    measured = {name: json.loads((RESULTS / f"{name}.json").read_text())["tables"] for name in ("prefill", "decode")}
    assert len(rows) == 5 and len(models) == 6
    for label, *cells in rows:
        for model, cell in zip(models, cells, strict=True):
            (row,) = (r for r in _rows(measured, label) if r["model"] == model)
            ours, theirs, ratio = (
                float(n)
                for n in re.fullmatch(r"([\d.,]+) / ([\d.,]+) \*\*([\d.]+)x\*\*", cell.replace(",", "")).groups()
            )  # type: ignore[union-attr]
            for shown, found in ((ours, row["ours"]), (theirs, row["transformers"]), (ratio, row["ratio"])):
                assert abs(shown - found) <= 0.005 * found + 0.05, (label, model, shown, found)


def _rows(measured: dict[str, dict[str, list[dict[str, object]]]], label: str) -> list[dict[str, object]]:
    if label.startswith("prefill"):
        return [
            r for r in measured["prefill"]["prefill, ms"] if r["sequences x tokens"] == label.removeprefix("prefill ")
        ]
    n_sequences = int(re.findall(r"\d+", label)[0])
    return [r for r in measured["decode"]["decode, ms a step"] if r["sequences"] == n_sequences]


def test_the_page_says_which_gguf_architectures_were_compared_with_llama_cpp() -> None:
    """The rows of the results are compared; of the others, one is another name of one of them."""
    results = json.loads((ROOT / "benchmarks" / "results" / "gguf.json").read_text())["tables"]
    (rows,) = results.values()
    compared = {re.split(r",| of ", str(row["family"]))[0] for row in rows if row["same model"]}
    page = (ROOT / "docs" / "how-to" / "cpu.md").read_text()
    (said,) = re.findall(r"^- With llama\.cpp itself, (.*?)^- Files of GLM-5.3", page, re.DOTALL | re.MULTILINE)
    (table,) = re.findall(r"^\| architectures \| (.*?) \|$", page, re.MULTILINE)
    were, _, were_not = said.partition("Not yet compared")
    names = [set(re.findall(r"`([\w-]+)`", part)) for part in (table, were, were_not)]
    known = _ARCHITECTURES.keys() - {"glm5next"}
    assert names == [known, compared, known - compared]
