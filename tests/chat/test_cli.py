"""The tests run the command line: its output, its errors, and that its memory holds what the chat template renders."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hybridmem import pages_ahead
from hybridmem.chat.cli import app
from hybridmem.chat.commands import serve
from hybridmem.chat.commands.demo import run_demo
from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer, encode_prompt, encode_turn, load_tokenizer
from hybridmem.chat.simulation.conversation import Conversation, Player
from hybridmem.chat.simulation.dialogues import make_dialogue
from hybridmem.memory import FormatError, HybridMemory, SpecError
from hybridmem.models import EMBEDDED, LanguageModel
from hybridmem.models.loading.load import OpenedModel

PROMPTS = ["My cat is called Zoe.", "What is my dog called?"]
SMALL = [[*command, "--budget", "1KiB"] for command in (["chat"], ["generate", "--prompt", "hello"], ["serve"])]
REPLIES = ["Okay, noted.", "You have not told me that."]


# The tests below run `generate`.


def test_several_prompts_print_their_replies_in_order() -> None:
    for order in (1, -1):
        prompts, replies = PROMPTS[::order], REPLIES[::order]
        result = CliRunner().invoke(app, ["generate", *(word for p in prompts for word in ("--prompt", p))])
        assert result.exit_code == 0, result.output
        assert result.stdout.splitlines() == [f"[{i + 1}] {reply}" for i, reply in enumerate(replies)]
        assert "tokens/s" in result.stderr


def test_one_prompt_prints_its_reply_alone(tokenizer: Tokenizer) -> None:
    result = CliRunner().invoke(app, ["generate", "--prompt", PROMPTS[0], "--max-tokens", "2"])
    assert (result.exit_code, result.stdout) == (0, tokenizer.decode(tokenizer.encode(REPLIES[0])[:2]) + "\n")


def test_a_raw_prompt_bypasses_the_chat_template() -> None:
    raw = "<|bos|><|user|>What is my dog called?<|end|><|assistant|>"
    result = CliRunner().invoke(app, ["generate", "--raw", "--prompt", raw])
    assert (result.exit_code, result.stdout) == (0, f"{REPLIES[1]}\n")


def assert_one_line_error(arguments: list[str], *words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read."""

    def read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(OpenedModel, "load", read)


@pytest.mark.parametrize("command", [["generate", "--prompt", "hello"], ["demo"]])
def test_a_bad_model_path_is_one_line(command: list[str], tmp_path: Path) -> None:
    assert_one_line_error([*command, "--model", str(tmp_path / "nowhere")], "nowhere")


@pytest.mark.parametrize("command", [["generate", "--prompt", "hello"], ["chat"], ["serve", "--port", "0"]])
def test_commands_take_pages_ahead(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[tuple[str, str]]()
    monkeypatch.setattr(pages_ahead, "begin", lambda model, device: begun.append((model, device)))
    model = str(tmp_path / "nowhere.gguf")
    assert_one_line_error([*command, "--model", model], "nowhere")
    assert begun == [(model, "cpu")]


def test_the_first_process_of_a_fleet_loads_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(chosen: Chosen) -> None:
        raise SpecError("no fleet here")

    monkeypatch.setattr(pages_ahead, "begin", lambda model, device: pytest.fail("pages were taken"))
    monkeypatch.setattr(serve, "run_fleet", refuse)
    model = str(tmp_path / "nowhere.gguf")
    assert_one_line_error(["serve", "--port", "0", "--replicas", "2", "--model", model], "no fleet here")


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_tokenizer_that_cannot_be_read_is_one_line(damage: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    if damage == "missing":
        (tmp_path / "tokenizer.json").unlink()
    else:
        (tmp_path / "tokenizer.json").write_text("{")
    assert_one_line_error(["generate", "--prompt", "hello", "--model", str(tmp_path)], "tokenizer")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--raw", "--prompt", ""], "token"),
        (["--prompt", "hello", "--budget", "1KiB"], "budget"),
        # The engine ends these requests with an error.
        (["--prompt", "My cat is called Zoe. " * 400, "--budget", "1MiB"], "bytes"),
        (["--prompt", "hello", "--dtype", "int7"], "int7"),
        (["--prompt", "hello", "--device", "abacus"], "abacus"),
    ],
)
def test_what_the_library_refuses_is_one_line(arguments: list[str], word: str) -> None:
    assert_one_line_error(["generate", *arguments], word)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["chat"], "chat template"),
        (["generate", "--chat", "--prompt", "hello"], "--raw"),
        (["demo"], "chat template"),
        (["generate", "--prompt", "hello " * 9000], "context"),
        (["generate", "--raw", "--prompt", ""], "token"),
        *((command, "too small") for command in SMALL),
    ],
)
@pytest.mark.usefixtures("unread")
def test_what_a_header_tells_is_refused_before_weights_are_read(
    arguments: list[str], word: str, tmp_path: Path
) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    config = json.loads((EMBEDDED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1000}))
    assert_one_line_error([*arguments, "--model", str(tmp_path)], word)


@pytest.mark.usefixtures("unread")
def test_a_tensor_that_is_missing_is_missed_before_others_are_read(tmp_path: Path) -> None:
    tensors = load_file(EMBEDDED / "model.safetensors")
    del tensors["model.final_layernorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    assert_one_line_error(["generate", "--prompt", "hello", "--model", str(tmp_path)], "final_layernorm")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(["generate"], "prompt"), (["demo", "--users", "1"], "users"), (["demo", "--turns", "1"], "turns")],
)
def test_usage_errors(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"--{word}" in result.stderr and "Traceback" not in result.stderr


# The tests below are about templates.


def test_a_template_that_rewrites_history_is_refused(tokenizer: Tokenizer) -> None:
    copy = load_tokenizer(EMBEDDED)
    copy.chat_template = "{{ messages[-1].content }}"
    history = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Okay, noted."}]
    with pytest.raises(FormatError, match="rewrites"):
        encode_turn(copy, history, "bye")
    copy.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(FormatError, match="refuses"):
        encode_turn(copy, history, "bye")
    copy.chat_template = None
    with pytest.raises(FormatError, match="--raw"):
        encode_prompt(copy, "hello", is_chat=True)


# The tests below are about conversations and the demo.


@pytest.mark.parametrize("max_reply_tokens", [32, 3])
def test_the_memory_holds_what_the_chat_template_renders(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, max_reply_tokens: int
) -> None:
    """This also holds if replies are cut short."""
    monkeypatch.setattr("hybridmem.chat.simulation.conversation.MAX_REPLY_TOKENS", max_reply_tokens)
    memory = HybridMemory(embedded.memory_spec, "64MiB", poison=True)
    users = [Conversation(f"user {i}", memory.open()) for i in range(3)]
    scripts = [(user, make_dialogue(random.Random(i), 2 + 3 * i)) for i, user in enumerate(users)]
    Player(Engine(embedded, memory, tokenizer), tokenizer, lambda *_: None).play("dialogue", scripts)
    for user, turns in scripts:
        assert len(user.messages) == 2 * len(turns)
        rendered = tokenizer.apply_chat_template(user.messages, return_dict=False)
        assert user.sequence.tokens.tolist() == rendered
    memory.check()


def test_the_demo_prints_its_table_and_succeeds() -> None:
    result = CliRunner().invoke(app, ["demo", "--users", "3", "--turns", "4"])
    assert result.exit_code == 0, result.output
    for words in (
        "model is tiny",  # What it can talk about is said first.
        "expected",
        "user 3",
        "fork A",
        "rollback within the window",
        "rollback to a checkpoint",
        "pages",
        "tokens/s",
        "All ",
    ):
        assert words in result.stdout
    assert "✗" not in result.stdout and "\x1b" not in result.stdout


def test_the_demo_recomputes_nothing(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    report = run_demo(embedded, tokenizer, n_users=2, n_turns=2, seed=5)
    assert report.is_ok
    assert [reuse.n_recomputed for reuse in report.reuses] == [0, 0, 0]
    assert all(reuse.n_reused > 0 and reuse.n_new > 0 for reuse in report.reuses)
    assert {answer.scene for answer in report.answers} >= {"dialogue", "forked", "told by other users only"}
    assert len(report.usage.by_sequence) == 4 and report.usage.used_bytes == sum(report.usage.by_kind.values())


def test_a_wrong_answer_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridmem.chat.simulation.dialogues.UNKNOWN", "I would never say that.")
    result = CliRunner().invoke(app, ["demo", "--users", "2", "--turns", "3"])
    assert result.exit_code == 1
    assert "✗" in result.stdout and "answers are wrong" in result.stdout and "Traceback" not in result.output


def test_a_rollback_that_does_nothing_fails_the_demo(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo checks what the memory really did, not what it was asked to do."""
    monkeypatch.setattr(HybridMemory, "rollback", lambda self, sequence, to: None)
    report = run_demo(embedded, tokenizer, n_users=2, n_turns=3)
    assert not report.is_ok


def test_the_demo_refuses_what_cannot_work(embedded: LanguageModel) -> None:
    with pytest.raises(SpecError, match="at least 2"):
        run_demo(embedded, load_tokenizer(EMBEDDED), n_users=1)
    bare = load_tokenizer(EMBEDDED)
    bare.chat_template = None
    with pytest.raises(FormatError, match="chat template"):
        run_demo(embedded, bare)


# The tests below run `warmup`.


def test_warmup_says_that_it_is_done() -> None:
    result = CliRunner().invoke(app, ["warmup"])
    assert result.exit_code == 0 and "kernels are ready" in result.stdout


def test_the_page_about_containers_fills_the_folder_that_its_image_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridmem.memory.kernels import cpu
    from hybridmem.memory.kernels.cpu.warm_up import NAMES
    from hybridmem.models.products import choice

    warmed: list[tuple[str, tuple[str, ...], torch.dtype]] = []

    def warm_up(names: Iterable[str], dtype: torch.dtype) -> float:
        warmed.append((os.environ["HYBRID_MEMORY_CACHE"], tuple(names), dtype))
        return 0.0

    compiled: list[list[choice.Kind]] = []
    monkeypatch.setattr(cpu, "warm_up", warm_up)
    monkeypatch.setattr(choice, "compile_ahead", compiled.append)
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", "elsewhere")
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "containers.md").read_text()
    image = page.partition("```text")[2].partition("```")[0].replace("/opt", str(tmp_path))
    (command,) = re.findall(r"RUN hybrid-memory (.*)", image)
    result = CliRunner().invoke(app, command.split())
    (folder,) = re.findall(r"ENV HYBRID_MEMORY_CACHE=(.*)", image)
    assert result.exit_code == 0 and folder in result.stdout
    assert warmed == [(folder, NAMES, torch.float32), (folder, NAMES, torch.bfloat16)]
    assert [{kind.dtype for kind in kinds} for kinds in compiled] == [{torch.float32}, {torch.bfloat16}]


def test_warmup_refuses_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID_MEMORY_CACHE", "elsewhere")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["warmup", "--all", "--to", str(tmp_path / "file")])
    assert result.exit_code != 0 and "cannot be written" in result.stderr
