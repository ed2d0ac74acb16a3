"""The kit finds the known faults of other libraries' memories."""

from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.conformance import PEERS, write_page
from hybridmem.memory.testing import PROMISES, Result, check
from tests.extent import few_cases

KNOWN = {
    # `crop` is wrong on a hybrid.
    ("transformers", "jamba, past recorded", "tokens taken back leave no trace"): "failed",
    # `crop` refuses only after it has cut attention.
    ("transformers", "jamba", "a sequence can begin again"): "failed",
    ("transformers", "jamba", "a text in parts is as the whole text"): "failed",  # A chunk begins without its state.
    # Rows of recurrent layers are not copied.
    ("transformers", "jamba, forks by rows", "a fork goes its own way"): "failed",
    ("transformers", "llama", "a fork goes its own way"): "passed",
    ("transformers", "llama", "tokens taken back leave no trace"): "passed",
    ("llama_cpp", "jamba", "tokens taken back leave no trace"): "refused",
    ("llama_cpp", "jamba, back by a partial copy", "tokens taken back leave no trace"): "failed",
    ("llama_cpp", "jamba", "a fork goes its own way"): "passed",
    ("mlx_lm", "jamba", "tokens taken back leave no trace"): "refused",
    ("mlx_lm", "llama", "tokens taken back leave no trace"): "passed",
    ("mlx_lm", "jamba", "a batch of any lengths is as each sequence alone"): "passed",
    ("mlx_lm", "jamba, in batches", "a batch of any lengths is as each sequence alone"): "failed",  # Padding is read.
    # Padding is read here, too.
    ("mlx_lm", "nemotron-h, in batches", "a batch of any lengths is as each sequence alone"): "failed",
    ("mlx_lm", "mamba2, in batches", "a batch of any lengths is as each sequence alone"): "passed",
}
"""A fault that is gone is good news, and this table is to be changed."""


@few_cases
@pytest.mark.parametrize(("package", "subject", "promise"), KNOWN)
def test_known_faults_are_found(package: str, subject: str, promise: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    (result,) = check(import_module(PEERS[package]).SUBJECTS[subject], [promise], n_examples=2)
    assert result.verdict == KNOWN[package, subject, promise], result.why


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    names = list(PROMISES)
    results = [Result(PROMISES[name], "passed", 1, 10, 5) for name in names[:-1]]
    results.append(Result(PROMISES[names[-1]], "failed", 1, 10, 5, "it is wrong\n  after", 3))
    write_page({"peer 1.0": {"whole": results, "gone": "its process ended"}}, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert f"| {names[0]} | passed |" in text and f"| {names[-1]} | **failed** |" in text
    assert "it is wrong (seed 3)" in text and "gone: its process ended" in text
    assert f"In all {10 * len(PROMISES)} operations" in text
