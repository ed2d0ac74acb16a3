"""`hybrid-memory inspect` describes files that are whole, and reports damaged ones in one line."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.session.saved import _digest as session_digest
from hybridmem.chat.session.session import ChatSession
from hybridmem.memory import FormatError, HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from hybridmem.models.loading.load import weight_bytes
from tests.inside import forged_file

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def inspect(path: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def assert_refused(path: Path, *words: str) -> None:
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ") and "\x1b" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Save a sequence of 100 tokens. Return the file, and its bytes by kind."""
    model = load_model("embedded")
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=8)
    sequence = memory.open()
    memory.run(model, {sequence: [5] * 100})
    path = tmp_path_factory.mktemp("saved") / "sequence.safetensors"
    memory.save(sequence, path)
    return path, memory.usage().by_kind


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    model = load_model("embedded")
    session = ChatSession(Engine(model, HybridMemory(model.memory_spec, "16MiB"), tokenizer), max_tokens=8)
    session.say("My cat is called Zoe.")
    folder = tmp_path_factory.mktemp("chat") / "session"
    session.save(folder)
    return folder


def forge(path: Path, **changes: Any) -> Path:
    """Write the file with another `about` or other metadata, and with a right checksum."""
    tensors, data = load_file(path), path.read_bytes()
    metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    metadata = {name: value for name, value in metadata.items() if name != "checksum"} | {
        n: json.dumps(v) for n, v in changes.items()
    }
    forged = path.with_name("forged.safetensors")
    forged.write_bytes(forged_file(tensors, metadata))
    return forged


# The tests below inspect files that are whole.


def test_a_saved_sequence(saved: tuple[Path, dict[str, int]]) -> None:
    path, by_kind = saved
    found = inspect(path)
    facts = found["facts"]
    assert (found["kind"], found["is_verified"]) == ("saved sequence", True)
    assert (facts["tokens"], facts["furthest position"], facts["rollback window"], facts["dtype"]) == (
        100,
        100,
        8,
        "torch.float32",
    )
    assert found["by_kind"] == {"tokens": 800, **by_kind}
    assert found["largest"][0]["n_bytes"] == max(by_kind.values())
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0
    for word in ("its checksum is right", "version 1", *by_kind, f"{sum(by_kind.values()) + 800:,}"):
        assert word in shown.stdout


def test_a_saved_chat(chat: Path) -> None:
    for path in (chat, chat / "session.json"):
        found = inspect(path)
        facts, (memory,) = found["facts"], found["parts"]
        assert (found["kind"], found["is_verified"], facts["messages"], facts["by user"], facts["tokens a reply"]) == (
            "saved chat",
            True,
            2,
            1,
            8,
        )
        assert (
            memory["kind"] == "saved sequence" and memory["facts"]["tokens"] > facts["tokens chosen by the model"] > 0
        )
    assert "a saved sequence" in " ".join(CliRunner().invoke(app, ["inspect", str(chat)]).stdout.split())


def test_a_model() -> None:
    found = inspect(EMBEDDED)
    loaded = found["facts"]["bytes of weights when loaded"]
    shown = CliRunner().invoke(app, ["inspect", str(EMBEDDED)]).stdout
    assert all(f"{name}: {n:,}" in shown for name, n in loaded.items()) and "{" not in shown
    facts = found["facts"]
    assert (found["kind"], facts["architecture"], facts["loads"], facts["layers"]) == (
        "model",
        "JambaForCausalLM",
        "yes",
        6,
    )
    assert facts["mamba1"].startswith("4 × ") and facts["attention"] == "2 × 4 query and 2 key heads of 32"
    assert found["by_kind"] == {"F32": sum(t.nbytes for t in load_file(EMBEDDED / "model.safetensors").values())}
    assert found["by_kind"]["F32"] <= weight_bytes(load_model("embedded"))
    assert facts["tokens of context"] == load_model("embedded").config.max_position_embeddings
    assert inspect(Path("embedded")) == found, "its name is that of other commands"


def test_a_config_alone_and_one_that_nobody_implements(tmp_path: Path) -> None:
    found = inspect(CONFIGS / "falcon-h1-7b.json")
    assert (found["kind"], found["facts"]["layers"], found["facts"]["dtype"]) == ("config", 44, "bfloat16")
    assert found["facts"]["ssd"].startswith("44 × ") and found["facts"]["attention"].startswith("44 × ")
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}')
    assert inspect(tmp_path)["facts"]["loads"].startswith("no: GPT2LMHeadModel is not supported")
    config = json.loads((EMBEDDED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    assert "quantised" in inspect(tmp_path)["facts"]["loads"]


def test_a_model_whose_tensors_do_not_fit(tmp_path: Path) -> None:
    shutil.copy(EMBEDDED / "config.json", tmp_path)
    tensors = load_file(EMBEDDED / "model.safetensors")
    missing = {n: t for n, t in tensors.items() if n != "model.final_layernorm.weight"}
    other = tensors | {"model.final_layernorm.weight": torch.zeros(3)}
    more = tensors | {"surplus": torch.zeros(3)}
    for changed, word in ((missing, "final_layernorm"), (other, "final_layernorm")):
        save_file(changed, tmp_path / "model.safetensors")
        loads = inspect(tmp_path)["facts"]["loads"]
        assert loads.startswith("no: ") and word in loads
    save_file(more, tmp_path / "model.safetensors")
    facts = inspect(tmp_path)["facts"]
    assert facts["loads"] == "yes" and facts["tensors that nobody asks for"] == ["surplus"]


# The tests below inspect files that are damaged.


def test_damaged_and_foreign_files_are_one_line(saved: tuple[Path, dict[str, int]], chat: Path, tmp_path: Path) -> None:
    data, rng, broken = saved[0].read_bytes(), random.Random(0), tmp_path / "broken"
    for _ in range(20):
        at = rng.randrange(len(data))
        broken.write_bytes(data[:at] + bytes([data[at] ^ (1 + rng.randrange(255))]) + data[at + 1 :])
        assert_refused(broken)
    for end in (0, 7, 100, len(data) - 1):
        broken.write_bytes(data[:end])
        assert_refused(broken, "broken")
    assert_refused(EMBEDDED / "model.safetensors", "no sequence")
    assert_refused(Path(__file__), "no safetensors")
    assert_refused(tmp_path, "checkpoints.safetensors")
    assert_refused(tmp_path / "nowhere", "there is no", "GGUF file")
    for content in ("", "[1]", "{}", "[" * 100_000, '{"architectures"'):
        (tmp_path / "config.json").write_text(content)
        assert_refused(tmp_path)
    copy = tmp_path / "chat"
    shutil.copytree(chat, copy)
    text = (copy / "session.json").read_text()
    (copy / "session.json").write_text(text.replace("Zoe", "Eve"))
    assert_refused(copy, "damaged")
    (copy / "session.json").write_text(text)
    next(copy.glob("memory-*")).unlink()
    assert_refused(copy, "cannot be read")
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    (model / "model.safetensors").write_bytes((EMBEDDED / "model.safetensors").read_bytes()[:1000])
    assert_refused(model, "damaged")


@pytest.mark.parametrize(
    "about", [{}, [], 5, {"signature": "x"}, {"signature": 7}, {"signature": None}, {"signature": 1e999}]
)
def test_forged_contents_are_one_line(saved: tuple[Path, dict[str, int]], about: object) -> None:
    assert_refused(forge(saved[0], about=about))


def test_a_forged_chat_does_not_lead_out_of_its_folder(chat: Path, tmp_path: Path) -> None:
    for memory in ("../session/secret", "/etc/passwd", 5):
        about = {n: v for n, v in json.loads((chat / "session.json").read_text()).items() if n != "sha256"} | {
            "memory": memory
        }
        (tmp_path / "session.json").write_text(json.dumps(about | {"sha256": session_digest(about)}))
        assert_refused(tmp_path, "contradicts itself")


def test_a_forged_chat_names_a_session_by_an_integer(chat: Path, embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """Hostile bytes found this: a half is between the first session and the second."""
    content = (chat / "session.json").read_text()
    about = {n: v for n, v in json.loads(content).items() if n != "sha256"} | {"first": 0.5}
    engine = Engine(embedded, HybridMemory(embedded.memory_spec, "16MiB"), tokenizer)
    try:
        (chat / "session.json").write_text(json.dumps(about | {"sha256": session_digest(about)}))
        with pytest.raises(FormatError, match="contradicts itself"):
            ChatSession.resume(engine, chat)
    finally:
        (chat / "session.json").write_text(content)


def test_hostile_strings_are_shown_harmlessly(saved: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    evil = "[red]x[/red]\x1b[2J\x07\u202e" + "y" * 100_000
    path = forge(saved[0], about={"model": evil, "signature": {evil: evil}})
    result = CliRunner().invoke(app, ["inspect", str(path)])
    assert result.exit_code == 0 and len(result.stdout) < 100_000
    assert not {"\x1b", "\x07", "\u202e"} & set(result.stdout) and "[red]x[/red]\\x1b[2J" in result.stdout
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [evil], "model_type": evil}))
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0 and not {"\x1b", "\x07", "\u202e"} & set(result.stdout)
    result = CliRunner().invoke(app, ["plan", "--model", str(tmp_path)])
    assert (
        result.exit_code == 1
        and not {"\x1b", "\x07", "\u202e"} & set(result.stderr)
        and len(result.stderr.splitlines()) == 1
    )


# The tests below inspect trees.


def test_a_sequence_with_checkpoints_and_forks(tmp_path: Path) -> None:
    model = load_model("embedded")
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=8)
    sequence = memory.open()
    memory.run(model, {sequence: [5] * 64})
    memory.checkpoint(sequence)
    memory.run(model, {sequence: [6] * 36})
    draft = memory.fork(sequence)
    memory.run(model, {draft: [7] * 20})
    path = tmp_path / "family.safetensors"
    memory.save(sequence, path, checkpoints=True, forks={"draft": draft})
    found = inspect(path)
    assert [(own["what"], own["depth"], own["n_tokens"]) for own in found["tree"]] == [
        ("sequence", 0, 100), ("checkpoint", 1, 64), ("fork 'draft'", 1, 120),
    ]  # fmt: skip
    blocks = {name: n for name, n in found["by_kind"].items() if name != "tokens"}
    assert sum(own["n_bytes"] for own in found["tree"]) == sum(blocks.values()) and found["is_verified"]
    assert found["tree"][1]["n_bytes"] < found["tree"][0]["n_bytes"], "pages are shared"
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "What grew from what" in shown.stdout and "fork 'draft'" in shown.stdout

    path.write_bytes(path.read_bytes()[:-1] + b"?")
    found = inspect(path)
    assert not found["is_verified"] and found["tree"][-1]["what"] == "fork 'draft' of 120 tokens: damaged"
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert "a part of it is damaged" in " ".join(shown.stdout.split())


def test_a_chat_with_branches(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = load_model("embedded")
    session = ChatSession(Engine(model, HybridMemory(model.memory_spec, "16MiB"), tokenizer), max_tokens=4)
    session.say("My cat is called Zoe.")
    branch = session.branch()
    branch.say("I live in [red]Rome[/red].")
    branch.branch()
    session.save(tmp_path)
    tree = inspect(tmp_path)["tree"]
    assert [(own["what"], own["depth"]) for own in tree] == [
        ("2 messages … My cat is called Zoe.", 0), ("4 messages … I live in [red]Rome[/red].", 1),
        ("4 messages … I live in [red]Rome[/red].", 2),
    ]  # fmt: skip


def test_a_saved_prefix_cache(tmp_path: Path) -> None:
    model = load_model("embedded")
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=8)
    cache = PrefixCache(memory)
    for tokens, owner in (([5] * 40, None), ([5] * 40 + [6] * 9, None), ([7, 8, 9], "anna")):
        sequence = memory.open()
        memory.run(model, {sequence: tokens})
        cache.insert(sequence, owner)
    cache.save(tmp_path)
    for path in (tmp_path, tmp_path / "checkpoints.safetensors"):
        found = inspect(path)
        assert (found["kind"], found["facts"]["checkpoints"]) == ("saved prefix cache", 3)
    assert [(own["what"], own["depth"], own["n_tokens"]) for own in found["tree"]] == [
        ("tokens 5, 5, 5, 5 …", 0, 40), ("tokens 6, 6, 6, 6 …", 1, 49), ("tokens 7, 8, 9 … of 'anna'", 0, 3),
    ]  # fmt: skip
    next(path for path in tmp_path.glob("blocks-*")).unlink()
    found = inspect(tmp_path)
    assert found["facts"]["files that are gone"] == 1 and "its file is gone" in str(found["tree"])
    assert "its file is gone" in CliRunner().invoke(app, ["inspect", str(tmp_path)]).stdout
