"""The tests say which files of measured choices are read, and which are refused. No step ever fails because of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hybridmem.memory.kernels.cuda import choices
from hybridmem.memory.kernels.cuda.choices import TUNABLES

DEVICE = torch.device("cuda", 0)
SIZES, CHOICE = {"n_states": 16, "itemsize": 2}, {"channels": 64, "chunk": 32, "num_warps": 2}
SCAN = TUNABLES["selective_scan"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Pretend a Hopper GPU, an empty cache, and a package without choices.

    `shipped.json` is what the package would bring.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(choices, "shipped_file", lambda capability: tmp_path / "shipped.json")
    choices.measured.cache_clear()
    yield tmp_path
    choices.measured.cache_clear()


def put(content: Any, path: Path | None = None) -> None:
    path = path or choices.cache_file("sm90")
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def file_of(*entries: Any, capability: str = "sm90", **others: Any) -> dict[str, Any]:
    return {"format": 1, "capability": capability, "choices": list(entries), **others}


def entry(kernel: str = "selective_scan", sizes: Any = None, choice: Any = None) -> dict[str, Any]:
    return {"kernel": kernel, "sizes": sizes or SIZES, "choice": choice or CHOICE}


def test_what_was_measured_counts_for_its_sizes_only() -> None:
    put(file_of(entry()))
    assert SCAN(DEVICE, 16, 2)._asdict() == CHOICE
    assert SCAN(DEVICE, 16, 4) == SCAN.default(16, 4)
    assert SCAN(torch.device("cpu"), 16, 2) == SCAN.default(16, 2)


def test_without_files_the_default_counts_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert SCAN(DEVICE, 16, 2) == SCAN.default(16, 2)
    assert not caplog.records


def test_the_user_s_file_goes_before_the_package_s(folder: Path) -> None:
    put(file_of(entry(), entry(sizes=SIZES | {"itemsize": 4})), folder / "shipped.json")
    put(file_of(entry(choice={"channels": 128, "chunk": 64, "num_warps": 1})))
    assert (SCAN(DEVICE, 16, 2).channels, SCAN(DEVICE, 16, 4).channels) == (128, 64)


def test_files_are_read_once() -> None:
    """Otherwise sums could change their order from one step to the next."""
    assert SCAN(DEVICE, 16, 2) == SCAN.default(16, 2)
    put(file_of(entry()))
    assert SCAN(DEVICE, 16, 2) == SCAN.default(16, 2)


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "3", '"x"', "\x00", "{}",
        file_of(entry(), capability="sm80"), file_of(entry(), format=2), file_of(choices=None), "[" * 99999,
    ],
    ids=[
        "empty", "cut off", "a list", "a number", "a text", "bytes", "no fields",
        "another GPU", "another format", "no choices", "deep",
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_ignored_with_one_warning(content: Any, caplog: pytest.LogCaptureFixture) -> None:
    put(content)
    for _ in range(3):
        assert SCAN(DEVICE, 16, 2) == SCAN.default(16, 2)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "choices_sm90.json is ignored" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (entry(kernel="warp_drive"), "there is no kernel 'warp_drive'"),
        (entry(sizes={"n_states": 16}), "chosen for n_states, itemsize"),
        (entry(sizes={"n_states": "16", "itemsize": 2}), "chosen for n_states, itemsize"),
        (entry(choice={"channels": 64}), "chooses channels, chunk, num_warps"),
        (entry(choice={"channels": 48, "chunk": 32, "num_warps": 2}), "cannot have channels = 48"),
        (entry(choice={"channels": 64.0, "chunk": 32, "num_warps": 2}), "cannot have channels = 64.0"),
        (entry(choice={"channels": 64, "chunk": 32, "num_warps": True}), "cannot have num_warps = True"),
        (entry(choice=[64, 2]), "keys"),
        ({"kernel": "selective_scan"}, "sizes"),
        ([], "indices"),
        (
            entry(
                "attend",
                dict.fromkeys(TUNABLES["attend"].sizes, 16),
                {"block_n": 8, "num_warps": 4, "num_stages": 2},
            ),
            "block_n = 8",
        ),
        (entry("scan_chunks", dict.fromkeys(TUNABLES["scan_chunks"].sizes, 16),
               {"chunk": 8, "rows": 32, "num_warps": 4, "num_stages": 1}), "chunk = 8"),
        (entry("split", dict.fromkeys(TUNABLES["split"].sizes, 16), {"rows": 100, "programs": 256}), "rows = 100"),
    ],
)  # fmt: skip
def test_a_choice_that_the_kernel_cannot_have_is_refused_and_others_count(
    wrong: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(file_of(wrong, entry()))
    assert SCAN(DEVICE, 16, 2)._asdict() == CHOICE
    assert len(caplog.records) == 1 and why in caplog.text
    assert list(choices.measured(DEVICE)) == [("selective_scan", (16, 2))]


def test_what_is_written_is_read(folder: Path) -> None:
    path, made = folder / "new" / "choices_sm90.json", {("selective_scan", (16, 2)): SCAN.checked(CHOICE)}
    made["attend", (16, 128, 2, -1)] = TUNABLES["attend"].checked({"block_n": 32, "num_warps": 2, "num_stages": 3})
    for _ in range(2):
        choices.write(path, "sm90", made, "a device")
        assert choices.read(path, "sm90") == made
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_cache_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert choices.cache_file("sm90") == folder / "hybrid-memory" / "choices_sm90.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/a/whole/path")
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert choices.cache_file("sm90") == folder / "home" / ".cache" / "hybrid-memory" / "choices_sm90.json"


def test_a_user_without_a_home_has_no_file(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", fail)
    put(file_of(entry()), folder / "shipped.json")
    assert SCAN(DEVICE, 16, 2)._asdict() == CHOICE


def test_each_default_is_one_of_the_choices_that_are_allowed() -> None:
    for made in TUNABLES.values():
        for size in (1, 2, 16, 128, 576):
            choice = made.default(*[size] * len(made.sizes))
            assert made.checked(choice._asdict()) == choice


@pytest.mark.parametrize("capability", ["sm90"])
def test_what_the_package_brings_is_whole(
    capability: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    path = choices.shipped_file(capability)
    assert bool(choices.read(path, capability)) == path.exists()
    assert not caplog.records
