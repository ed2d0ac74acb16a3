"""The command line: what it prints, how it fails, and that its memory holds what the chat template renders."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chat.cli import app
from chat.conversation import Conversation, Player
from chat.demo import run_demo
from chat.dialogues import make_dialogue
from chat.generation import Batch, generate
from chat.prompts import Tokenizer, encode_prompt, encode_turn, find_stop_ids, load_tokenizer
from memory import FormatError, HybridMemory, SpecError
from models import EMBEDDED, LanguageModel, load_model

PROMPTS = ["My cat is called Zoe.", "What is my dog called?"]
REPLIES = ["Okay, noted.", "You have not told me that."]


pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("embedded")


def make_batch(model: LanguageModel, tokenizer: Tokenizer, *, remembers_end: bool = False, step_tokens: int = 512) -> Batch:
    memory = HybridMemory(model.memory_spec, "64MiB", poison=True)
    return Batch(model, memory, find_stop_ids(tokenizer, model), remembers_end=remembers_end, step_tokens=step_tokens)


def decode(batch: Batch, tokenizer: Tokenizer, texts: list[str], max_tokens: int = 32) -> list[list[int]]:
    ids: list[list[int]] = [[] for _ in texts]
    for step in generate(batch, [encode_prompt(tokenizer, text, is_chat=None) for text in texts], max_tokens):
        for i, new in step:
            ids[i].append(new.token_id)
    return ids


# generate


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


@pytest.mark.parametrize("command", [["generate", "--prompt", "hello"], ["demo"]])
def test_a_bad_model_path_is_one_line(command: list[str], tmp_path: Path) -> None:
    assert_one_line_error([*command, "--model", str(tmp_path / "nowhere")], "nowhere")


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
        (["--prompt", "hello", "--dtype", "int7"], "int7"),
        (["--prompt", "hello", "--device", "abacus"], "abacus"),
    ],
)
def test_what_the_library_refuses_is_one_line(arguments: list[str], word: str) -> None:
    assert_one_line_error(["generate", *arguments], word)


@pytest.mark.parametrize(
    ("arguments", "word"), [(["generate"], "prompt"), (["demo", "--users", "1"], "users"), (["demo", "--turns", "1"], "turns")]
)
def test_usage_errors(arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert f"--{word}" in result.stderr and "Traceback" not in result.stderr


# Decoding


def test_a_batch_decodes_what_each_prompt_alone_would(model: LanguageModel, tokenizer: Tokenizer) -> None:
    texts = [*PROMPTS, "I read a book today.", "My lucky number is 23. " * 12]
    together = decode(make_batch(model, tokenizer), tokenizer, texts)
    assert together == [decode(make_batch(model, tokenizer), tokenizer, [text])[0] for text in texts]
    assert together == decode(make_batch(model, tokenizer, step_tokens=7), tokenizer, texts)


def test_finished_sequences_drop_out_and_everything_is_closed(model: LanguageModel, tokenizer: Tokenizer) -> None:
    batch = make_batch(model, tokenizer)
    prompts = [encode_prompt(tokenizer, text, is_chat=True) for text in PROMPTS]
    steps = list(generate(batch, prompts, 32))
    short, long = (len(tokenizer.encode(reply)) + 1 for reply in REPLIES)
    assert [[i for i, _ in step] for step in steps] == [[0, 1]] * short + [[1]] * (long - short)
    assert [new.is_last for step in steps for i, new in step if i == 0] == [False] * (short - 1) + [True]
    assert (batch.speed.n_generated, batch.speed.n_steps) == (short + long, long)
    assert batch.speed.n_fed == sum(map(len, prompts)) + short + long - 2  # the ends were chosen, not fed
    assert batch.memory.usage().used_bytes == 0 and batch.is_idle


def test_a_stream_left_early_closes_its_sequences(model: LanguageModel, tokenizer: Tokenizer) -> None:
    batch = make_batch(model, tokenizer)
    stream = generate(batch, [encode_prompt(tokenizer, PROMPTS[0], is_chat=True)], 32)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert batch.memory.usage().by_sequence == {} and batch.is_idle


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


# Conversations and the demo


@pytest.mark.parametrize("max_reply_tokens", [32, 3])
def test_the_memory_holds_what_the_chat_template_renders(
    model: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, max_reply_tokens: int
) -> None:
    """Even where replies are cut short."""
    monkeypatch.setattr("chat.conversation.MAX_REPLY_TOKENS", max_reply_tokens)
    batch = make_batch(model, tokenizer, remembers_end=True)
    users = [Conversation(f"user {i}", batch.memory.open()) for i in range(3)]
    scripts = [(user, make_dialogue(random.Random(i), 2 + 3 * i)) for i, user in enumerate(users)]
    Player(batch, tokenizer, lambda *_: None).play("dialogue", scripts)
    for user, turns in scripts:
        assert len(user.messages) == 2 * len(turns)
        rendered = tokenizer.apply_chat_template(user.messages, return_dict=False)
        assert user.sequence.tokens.tolist() == rendered
    batch.memory.check()


def test_the_demo_prints_its_table_and_succeeds() -> None:
    result = CliRunner().invoke(app, ["demo", "--users", "3", "--turns", "4"])
    assert result.exit_code == 0, result.output
    for words in ("expected", "user 3", "fork A", "rollback within the window", "rollback to a checkpoint", "pages", "tokens/s", "All "):
        assert words in result.stdout
    assert "✗" not in result.stdout and "\x1b" not in result.stdout


def test_the_demo_recomputes_nothing(model: LanguageModel, tokenizer: Tokenizer) -> None:
    report = run_demo(model, tokenizer, n_users=2, n_turns=2, seed=5)
    assert report.is_ok
    assert [reuse.n_recomputed for reuse in report.reuses] == [0, 0, 0]
    assert all(reuse.n_reused > 0 and reuse.n_new > 0 for reuse in report.reuses)
    assert {answer.scene for answer in report.answers} >= {"dialogue", "forked", "told by other users only"}
    assert len(report.usage.by_sequence) == 4 and report.usage.used_bytes == sum(report.usage.by_kind.values())


def test_a_wrong_answer_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chat.dialogues.UNKNOWN", "I would never say that.")
    result = CliRunner().invoke(app, ["demo", "--users", "2", "--turns", "3"])
    assert result.exit_code == 1
    assert "✗" in result.stdout and "answers are wrong" in result.stdout and "Traceback" not in result.output


def test_a_rollback_that_does_nothing_fails_the_demo(model: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo looks at what the memory really did, not at what it was asked to do."""
    monkeypatch.setattr(HybridMemory, "rollback", lambda self, sequence, to: None)
    report = run_demo(model, tokenizer, n_users=2, n_turns=3)
    assert not report.is_ok


def test_the_demo_refuses_what_cannot_work(model: LanguageModel) -> None:
    with pytest.raises(SpecError, match="at least 2"):
        run_demo(model, load_tokenizer(EMBEDDED), n_users=1)
    bare = load_tokenizer(EMBEDDED)
    bare.chat_template = None
    with pytest.raises(FormatError, match="chat template"):
        run_demo(model, bare)


# warmup


def test_warmup_says_that_it_is_done() -> None:
    result = CliRunner().invoke(app, ["warmup"])
    assert result.exit_code == 0 and "kernels are ready" in result.stdout
