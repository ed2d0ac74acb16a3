"""`serve --draft-head` takes the checkpoint's own head or a folder's, with one budget, and gives the same replies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from hybridmem import EMBEDDED
from hybridmem.chat.commands.inspection import inspect_path
from hybridmem.memory import FormatError, SpecError
from hybridmem.memory.storage import read_blocks
from hybridmem.memory.storage.files import write_blocks
from tests.chat.commands.test_draft_model import served
from tests.extent import only_in_long
from tests.models.draft_heads.mtp_checkpoints import write_mtp_checkpoint
from tests.models.families.qwen3_5 import qwen3_5_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a random model with a head, and the tokenizer of the embedded model."""
    vocab_size = json.loads((Path(EMBEDDED) / "config.json").read_text())["vocab_size"]
    place = tmp_path / "with-a-head"
    write_mtp_checkpoint(place, qwen3_5_config(vocab_size=vocab_size), is_often_right=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(EMBEDDED) / name, place)
    return place


@only_in_long
def test_a_draft_head_changes_no_reply_and_shares_the_budget(folder: Path, tmp_path: Path) -> None:
    """The head is the checkpoint's, or that of a folder which holds nothing else.

    Without a head, auto drafts nothing.
    """
    alone, without = tmp_path / "alone", tmp_path / "without"
    alone.mkdir()
    shutil.copytree(folder, without)
    tensors = load_file(folder / "model.safetensors")
    for place, is_head in ((alone, True), (without, False)):
        kept = {n: x for n, x in tensors.items() if n.startswith("mtp.") == is_head}
        save_file(kept, place / "model.safetensors", {"format": "pt"})
    shutil.copy(folder / "config.json", alone)
    texts, drafted = set[tuple[str, ...]](), list[int]()
    for draft_head in ("none", "auto", str(alone)):
        engine = served(model=str(folder), draft_head=draft_head, budget="16MiB", threads=1).engine
        for _ in range(9):  # A drafter is tried once the cost of plain steps is known.
            generations = [engine.submit([i, 3, 5], max_tokens=40) for i in (1, 2)]
            engine.run()
        texts.add(tuple(generation.text for generation in generations))
        drafted.append(engine.stats.n_drafted)
        assert (engine.memory.budget_bytes == 16 << 20) == (draft_head == "none")
    assert len(texts) == 1 and drafted[0] == 0 and min(drafted[1:]) > 0
    engine = served(model=str(without), draft_head="auto", budget="16MiB", threads=1).engine
    assert engine.memory.budget_bytes == 16 << 20, "it has no head"
    shutil.copytree(alone, without / "draft_head")
    engine = served(model=str(without), draft_head="auto", budget="16MiB", threads=1).engine
    assert engine.memory.budget_bytes < 16 << 20, "its head is in the folder beside its files"


def test_inspect_says_that_a_checkpoint_has_a_head(folder: Path) -> None:
    facts = inspect_path(folder).facts
    assert "draft head" in facts and "tensors that nobody asks for" not in facts
    shutil.copytree(folder, folder / "draft_head")
    tensors = load_file(folder / "model.safetensors")
    kept = {n: x for n, x in tensors.items() if not n.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert inspect_path(folder).facts["draft head"].endswith("from draft_head/")
    assert inspect_path(Path(EMBEDDED)).facts["draft head"].endswith("from draft_head/")


def test_options_that_exclude_each_other_and_folders_without_a_head_are_refused(folder: Path) -> None:
    with pytest.raises(SpecError, match="leave one out"):
        served(model=str(folder), draft_head="auto", draft_model="embedded", threads=1)
    with pytest.raises(SpecError, match="--rollback-window"):
        served(model=str(folder), draft_head="auto", rollback_window=0, threads=1)
    with pytest.raises(FormatError, match="holds no draft head"):
        served(model=str(folder), draft_head=EMBEDDED, threads=1)


def test_a_server_that_starts_again_knows_what_its_head_remembered(folder: Path, tmp_path: Path) -> None:
    """The next server continues from the text, and its head too. Folders without a head's part are read as well."""
    options = {
        "model": str(folder), "draft_head": "auto", "budget": "16MiB", "threads": 1,
        "prefixes": str(tmp_path / "kept"), "prefix_bytes": "32MiB",
    }  # fmt: skip
    prompt = [1, *range(5, 45)] * 2
    first = served(**options)
    generation = first.engine.submit(prompt, max_tokens=20, owner="a")
    first.engine.run()
    assert first.options.save is not None
    first.options.save()
    text = [*prompt, *generation.token_ids]
    for is_kept in (True, False):
        if not is_kept:
            shutil.rmtree(tmp_path / "kept" / "drafts")
        engine = served(**options).engine
        assert engine.drafted_texts is not None and engine.prefixes is not None
        found, n = engine.prefixes.find([*text, 2], "a").reused, len(text) - 1
        assert found == n and engine.drafted_texts.hold(np.array(text[:n]), "a") == is_kept
        sequence, lookup = engine.open_prefix([*text, 2], "a")
        assert lookup.reused == sequence.length == n - is_kept, "the last hidden state is computed again for the head"


def test_the_prefixes_of_another_head_are_replaced(folder: Path, tmp_path: Path) -> None:
    options = {"model": str(folder), "budget": "16MiB", "threads": 1, "prefixes": str(tmp_path / "kept")}
    first = served(draft_head="auto", rollback_window=16, **options)
    first.engine.submit([1, *range(5, 45)], max_tokens=20)
    first.engine.run()
    assert first.options.save is not None
    first.options.save()
    drafts = tmp_path / "kept" / "drafts" / "checkpoints.safetensors"
    tensors, about = read_blocks(str(drafts))
    about["signature"]["layers"] = []
    write_blocks(str(drafts), tensors, {name: own for name, own in about.items() if name != "version"})
    again = served(draft_head="auto", rollback_window=16, **options)
    assert again.engine.drafted_texts is not None and again.options.save is not None
    assert again.engine.drafted_texts.prefixes.stats().n_checkpoints == 0
    again.options.save()
    assert read_blocks(str(drafts))[1]["signature"]["layers"]
