"""A session computes only what differs after something was taken back.

Its replies are those of a model that reads everything anew.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.prompts import Tokenizer, load_tokenizer, render
from hybridmem.chat.session.history import Utterance, common_tokens, decode, encode_history
from hybridmem.chat.session.session import ChatSession, Turn
from hybridmem.chat.session.turn import EDITED, LAST, NEW, NO_CHECKPOINT, REWRITTEN
from hybridmem.memory import BatchError, CapacityError, FormatError, HybridMemory, SequenceError, StepError
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.models import EMBEDDED
from tests.chat.talking import TALKERS, Counted, assert_all_given_back, decode_fresh, load_talker, make_engine
from tests.extent import few_cases, only_in_long

ROOT = Path(__file__).parents[3]
WINDOW = 8
STRIPPING = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}{{ "
    "message.content.split('</think>')[-1] }}{% else %}{{ message.content }}{% endif %}<|end|>{% endfor %}{% if "
    "add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The embedded template, but earlier replies lose their thoughts."""
LINES = (
    "My cat is called Zoe.",
    "It rained all morning. I read a book today and went swimming with friends, and the train was late.",
    "My favourite colour is turquoise.",
    "What is my cat called?",
)


@pytest.fixture(scope="module", params=TALKERS)
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_talker(request.param, tmp_path_factory.mktemp("talker"))


@pytest.fixture
def stripping() -> Tokenizer:
    copy = load_tokenizer(EMBEDDED)
    copy.chat_template = STRIPPING
    return copy


def counted(session: ChatSession) -> Counted:
    model = session.engine.model
    assert isinstance(model, Counted)
    return model


class Witness:
    """Calls a session, and checks each turn.

    It checks the counts and the reply, and that the turn continues from the nearest checkpoint at least.
    """

    def __init__(self, model: Any, tokenizer: Tokenizer, session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model, self.tokenizer, self.session = model, tokenizer, session
        self.marks: list[list[int]] = [[]]
        insert = PrefixCache.insert

        def note(cache: PrefixCache, sequence: Any, owner: Any = None) -> None:
            self.marks.append(sequence.tokens.tolist())
            insert(cache, sequence, owner)

        monkeypatch.setattr(PrefixCache, "insert", note)

    def __call__(self, call: Callable[[], Turn]) -> Turn:
        session, model, stats = self.session, counted(self.session), self.session.engine.stats
        n_fed, n_engine, marks = model.n_fed, stats.n_fed, list(self.marks)
        held = [] if session.sequence is None else session.sequence.tokens.tolist()
        turn = call()
        session.engine.memory.check()
        prompt = encode_history(self.tokenizer, session.messages[:-1]).token_ids
        # All tokens of the reply are fed. A reply that was cut gets an end, which is fed too.
        n_end = len(turn.token_ids) + (turn.finish_reason == "length")
        assert model.n_fed - n_fed == turn.n_computed + n_end == stats.n_fed - n_engine
        assert turn.n_prompt == len(prompt) and sum(turn.computed.values()) == turn.n_computed
        nearest = max(len(mark) for mark in marks if mark == prompt[: len(mark)] and len(mark) < len(prompt))
        known = max(common_tokens(mark, prompt) for mark in [*marks, held])
        assert nearest <= turn.n_reused <= min(known, len(prompt) - 1)
        said = decode_fresh(self.model, prompt, len(turn.token_ids), session.engine.stop_ids)
        assert list(turn.token_ids) == said
        assert session.sequence is not None and session.sequence.tokens.tolist()[: len(prompt)] == prompt
        return turn


# The tests below are about what is computed.


@few_cases
@pytest.mark.parametrize("window", [0, WINDOW])
def test_only_what_differs_is_computed_again(
    talker: Any, tokenizer: Tokenizer, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(make_engine(talker, tokenizer, rollback_window=window), max_tokens=6)
    witness = Witness(talker, tokenizer, session, monkeypatch)
    first = witness(lambda: session.say(LINES[0]))
    assert (first.n_reused, set(first.computed)) == (0, {NEW})
    for line in LINES[1:]:
        n_held = session.sequence.length  # type: ignore[union-attr]
        turn = witness(lambda line=line: session.say(line))  # type: ignore[misc]
        assert turn.n_reused >= n_held - (1 if window else 7) and set(turn.computed) <= {NEW, NO_CHECKPOINT}

    again = witness(session.regenerate)
    assert again.token_ids == turn.token_ids
    assert again.computed == {LAST: 1} if window else again.n_computed <= len(tokenizer.encode(LINES[3])) + 11

    edited = witness(lambda: session.edit(2, LINES[1].replace("rained", "snowed")))
    # The session continues from the checkpoint at the reply before, or from where the window reaches. It never computes
    # the first exchange again.
    assert edited.n_reused >= first.n_prompt and set(edited.computed) <= {EDITED, NO_CHECKPOINT}
    assert (
        edited.computed[EDITED] < len(tokenizer.encode(LINES[1])) + 5
        and [m.role for m in session.messages] == ["user", "assistant"] * 2
    )

    assert session.undo()[0].content.startswith("It snowed")
    turn = witness(lambda: session.say(LINES[2]))
    assert turn.n_reused >= first.n_prompt and [m.content for m in session.messages[::2]] == [LINES[0], LINES[2]]
    session.close()
    assert_all_given_back(session.engine)


def test_attention_alone_needs_no_checkpoint(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_talker("llama", tmp_path)
    session = ChatSession(make_engine(model, tokenizer, has_prefixes=False), max_tokens=6)
    witness = Witness(model, tokenizer, session, monkeypatch)
    for line in LINES:
        witness(lambda line=line: session.say(line))  # type: ignore[misc]
    held = session.sequence.tokens.tolist()  # type: ignore[union-attr]
    turn = witness(lambda: session.edit(2, "It was windy all day."))
    prompt = encode_history(tokenizer, session.messages[:-1]).token_ids
    assert turn.n_reused == common_tokens(held, prompt) and turn.computed == {EDITED: len(prompt) - turn.n_reused}
    session.close()
    assert_all_given_back(session.engine)


def test_without_checkpoints_it_says_why_all_is_computed(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_talker("mamba", tmp_path)
    session = ChatSession(make_engine(model, tokenizer, has_prefixes=False), max_tokens=6)
    witness = Witness(model, tokenizer, session, monkeypatch)
    for line in LINES:
        witness(lambda line=line: session.say(line))  # type: ignore[misc]
    turn = witness(lambda: session.edit(4, "My dog is called Otis."))
    assert turn.n_reused == 0 and turn.computed[NO_CHECKPOINT] > turn.computed[EDITED] > 0


@few_cases
def test_stripped_thoughts_cost_the_reply_they_were_in(
    talker: Any, stripping: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the history before them is, none of its tokens is computed again."""
    session = ChatSession(make_engine(talker, stripping), max_tokens=40)
    model, words = counted(session), stripping.encode("Okay, noted.")
    thoughts = stripping.encode("<think>The user has a cat. I shall remember that it is called Zoe.</think>")
    # The thoughts are longer than the window, so that the window alone cannot reach back over them.
    assert len(thoughts) > 2 * WINDOW
    n_prompt = len(encode_history(stripping, [Utterance("user", LINES[0])]).token_ids)
    model.say([*thoughts, *words, stripping.eos_token_id], at=n_prompt)
    first = session.say(LINES[0])
    assert first.text.startswith("<think>") and first.text.endswith("</think>Okay, noted.")
    for line in LINES[1:]:
        model.says = {}
        session.max_tokens = 6
        before = encode_history(stripping, session.messages[:-1]).token_ids
        turn = Witness(talker, stripping, session, monkeypatch)(lambda line=line: session.say(line))  # type: ignore[misc]
        if line == LINES[1]:
            assert turn.n_reused == len(before) == n_prompt
            assert turn.computed[REWRITTEN] == len(words) and turn.computed == {
                REWRITTEN: len(words),
                NEW: turn.n_computed - len(words),
            }
        else:
            assert REWRITTEN not in turn.computed
    assert "<think>" not in render(stripping, [{"role": m.role, "content": m.content} for m in session.messages])
    # The edit goes back to where the thoughts were in force: the opening of that reply is still a checkpoint.
    session.edit(0, "My cat is called Tom.")
    assert session.messages[0].content == "My cat is called Tom."
    session.close()
    assert_all_given_back(session.engine)


def test_words_chosen_in_other_tokens_stay_as_they_were_chosen(
    talker: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(make_engine(talker, tokenizer), max_tokens=40)
    spelled = tokenizer.convert_tokens_to_ids(list("Okay,noted."))
    assert spelled != tokenizer.encode("Okay,noted.")
    n_prompt = len(encode_history(tokenizer, [Utterance("user", LINES[0])]).token_ids)
    counted(session).say([*spelled, tokenizer.eos_token_id], at=n_prompt)
    assert session.say(LINES[0]).text == "Okay,noted." == session.messages[1].content
    counted(session).says = {}
    session.max_tokens = 4
    turn = Witness(talker, tokenizer, session, monkeypatch)(lambda: session.say("Okay,noted."))
    assert turn.n_reused == n_prompt + len(spelled) + 1 and set(turn.computed) == {NEW}


def test_what_a_stop_string_cut_is_read_as_its_text(
    talker: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(make_engine(talker, tokenizer), max_tokens=40, stop=", no")
    n_prompt = len(encode_history(tokenizer, [Utterance("user", LINES[0])]).token_ids)
    counted(session).say(tokenizer.encode("Okay, noted."), at=n_prompt)
    turn = session.say(LINES[0])
    assert (turn.text, turn.finish_reason) == ("Okay", "stop")
    counted(session).says = {}
    session.stop, session.max_tokens = (), 4
    later = Witness(talker, tokenizer, session, monkeypatch)(lambda: session.say(LINES[1]))
    assert later.n_reused == n_prompt + len(tokenizer.encode("Okay"))


def test_one_long_message_is_edited_at_its_end_from_a_mark_before_it(talker: Any, tokenizer: Tokenizer) -> None:
    """If the last message of a given history changes, the messages before it are not computed again."""
    given = [Utterance("user", LINES[1]), Utterance("assistant", "That sounds nice."), Utterance("user", LINES[0])]
    given.append(Utterance("assistant", "Okay, noted."))
    session = ChatSession(make_engine(talker, tokenizer), messages=given, max_tokens=4)
    first = session.say(LINES[3])
    assert first.computed == {NEW: first.n_prompt}
    assert session.edit(2, "I found a lamp today.").n_reused >= len(
        encode_history(tokenizer, given[:2], awaits_reply=False).token_ids
    )
    assert session.edit(0, LINES[2]).n_prompt < first.n_prompt


def test_locating_is_not_fooled_by_what_is_said(tokenizer: Tokenizer) -> None:
    """A reply "a" is not found in "<|assistant|>", nor "user" in "<|user|>".

    Marks that users quote belong to the users' text.
    """
    ids = tuple(tokenizer.convert_tokens_to_ids(list("as")))
    said = [
        Utterance("user", "a"),
        Utterance("assistant", "as", ids),
        Utterance("user", "as"),
        Utterance("assistant", "user"),
    ]
    history = encode_history(tokenizer, [*said, Utterance("user", "|>")])
    assert history.token_ids == [
        1, 3, *tokenizer.encode("a"), 2, 4, *ids, 2, 3, *tokenizer.encode("as"), 2, 4, *tokenizer.encode("user"), 2, 3,
        *tokenizer.encode("|>"), 2, 4,
    ]  # fmt: skip


def test_a_template_that_shows_the_last_messages_only(tokenizer: Tokenizer) -> None:
    short = load_tokenizer(EMBEDDED)
    short.chat_template = STRIPPING.replace("in messages", "in messages[-2:]")
    said = [
        Utterance("user", "a"),
        Utterance("assistant", "b", (tokenizer.convert_tokens_to_ids("b"),)),
        Utterance("user", "c"),
    ]
    history = encode_history(short, [*said[:2], said[1], said[2]])
    assert history.spans[:2] == (None, None) and None not in history.spans[2:]
    assert decode(short, history.token_ids) == "bc"


# The tests below are about branches, sleep and files.


def test_branches_share_until_they_part(talker: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ChatSession(make_engine(talker, tokenizer), max_tokens=6)
    session.say(LINES[1])
    used_bytes = session.engine.memory.usage().used_bytes
    with session.branch() as branch:
        assert session.engine.memory.usage().used_bytes == used_bytes and branch.messages == session.messages
        witnesses = [Witness(talker, tokenizer, one, monkeypatch) for one in (session, branch)]
        ours = witnesses[0](lambda: session.say(LINES[0]))
        theirs = witnesses[1](lambda: branch.say(LINES[2]))
        assert 0 < ours.n_reused <= theirs.n_reused <= ours.n_reused + 2  # The cache has seen "<|user|>My" by then.
        assert session.messages[2].content == LINES[0] and branch.messages[2].content == LINES[2]
    assert branch.messages and branch.sequence is None  # The branch is closed, but can still be read.
    session.close()
    assert_all_given_back(session.engine)


def test_sleeping_gives_the_bytes_back_and_changes_nothing(talker: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = []
    for sleeps in (False, True):
        session = ChatSession(make_engine(talker, tokenizer, has_prefixes=False), max_tokens=6)
        session.say(LINES[0])
        if sleeps:
            session.sleep()
            assert session.engine.memory.usage().used_bytes == 0
            session.save(tmp_path / "asleep")
        turns.append(session.say(LINES[1]))
        if sleeps:
            session.sleep()
            with session.branch() as branch:
                assert branch.sequence is not None and not session.sequence.is_swapped  # type: ignore[union-attr]
            session.sleep()
        session.close()
        assert_all_given_back(session.engine)
    assert turns[0] == turns[1]
    assert ChatSession.resume(session.engine, tmp_path / "asleep").say(LINES[1]).token_ids == turns[0].token_ids


@few_cases
@pytest.mark.parametrize("sleeps", [False, True], ids=["", "asleep"])
def test_a_saved_session_holds_nothing_that_was_taken_back(
    talker: Any, tokenizer: Tokenizer, tmp_path: Path, sleeps: bool
) -> None:
    """The memory may still hold it, where a rollback does not reach so far.

    The next message decides where the session continues.
    """
    session = ChatSession(make_engine(talker, tokenizer, has_prefixes=False), max_tokens=40)
    session.say(LINES[0])
    session.say(LINES[1])
    session.undo()
    said = encode_history(tokenizer, session.messages, awaits_reply=False).token_ids
    assert session.sequence is not None and session.sequence.length >= len(said)
    if sleeps:
        session.sleep()
    session.save(tmp_path)
    resumed = ChatSession.resume(session.engine, tmp_path)
    held = [] if resumed.sequence is None else resumed.sequence.tokens.tolist()
    assert held == said[: len(held)]
    assert resumed.say(LINES[2]).token_ids == session.say(LINES[2]).token_ids
    resumed.close(), session.close()
    assert_all_given_back(session.engine)


def test_a_saved_session_is_its_owners_alone_and_what_was_left_half_written_goes(
    talker: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    session = ChatSession(make_engine(talker, tokenizer), max_tokens=4)
    session.say(LINES[0])
    session.save(tmp_path)
    left = [
        tmp_path / f"{name}{suffix}"
        for name in ("session.json", f"memory-{'a' * 32}.safetensors")
        for suffix in (f".{'b' * 32}.part", *([] if name == "session.json" else [""]))
    ]
    other = tmp_path / "notes.txt"
    for path in (*left, other):
        path.touch()
    session.save(tmp_path)
    files = list(tmp_path.iterdir())
    assert not any(path in files for path in left) and other in files and len(files) == 3
    assert {path.stat().st_mode & 0o777 for path in files if path != other} == {0o600}
    assert ChatSession.resume(session.engine, tmp_path).messages == session.messages


def test_a_lost_swap_file_is_computed_again(embedded: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    memory = HybridMemory(embedded.memory_spec, "16MiB", host_budget=1, swap_dir=tmp_path, poison=True)
    session = ChatSession(Engine(Counted(embedded), memory, tokenizer), max_tokens=20)
    session.say(LINES[0])
    session.sleep()
    for path in tmp_path.iterdir():
        path.unlink()
    turn = session.say(LINES[3])
    assert turn.text == "Your cat is called Zoe." and turn.n_reused == 0 and turn.computed[NO_CHECKPOINT] > 0
    session.close()
    assert_all_given_back(session.engine)


SAY_ON = """
import json, sys, torch
torch.set_num_threads(1)
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.session import ChatSession
from hybridmem.models import EMBEDDED, load_model
from tests.chat.talking import make_engine

session = ChatSession.resume(make_engine(load_model("embedded"), load_tokenizer(EMBEDDED)), sys.argv[1])
turns = [session.say(line) for line in sys.argv[2:]]
said = [*(list(turn.token_ids) for turn in turns)]
print(json.dumps([said, turns[0].n_reused, session.engine.model.digest.hexdigest()]))
"""


@only_in_long
def test_a_saved_session_goes_on_in_another_process_bit_for_bit(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=9, sampling=Sampling(0.7, seed=3))
    for line in LINES[:2]:
        session.say(line)
    session.save(tmp_path / "saved")
    session.save(tmp_path / "saved")  # This replaces the first file.
    assert len(list((tmp_path / "saved").iterdir())) == 2
    command = [sys.executable, "-c", SAY_ON, str(tmp_path / "saved"), *LINES[2:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    model = counted(session)
    model.digest = hashlib.sha256()
    turns = [session.say(line) for line in LINES[2:]]
    assert json.loads(done.stdout) == [
        [list(turn.token_ids) for turn in turns],
        turns[0].n_reused,
        model.digest.hexdigest(),
    ]


def test_a_session_of_which_nothing_was_computed_is_saved_too(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine = make_engine(embedded, tokenizer)
    given = [Utterance("user", LINES[0]), Utterance("assistant", "Okay, noted.")]
    ChatSession(engine, messages=given, max_tokens=20, stop="!").save(tmp_path)
    resumed = ChatSession.resume(engine, tmp_path)
    assert (list(resumed.messages), resumed.stop, resumed.sequence) == (given, ("!",), None)
    assert resumed.say(LINES[3]).text == "Your cat is called Zoe."


@pytest.mark.parametrize(
    "damage", ["nothing there", "cut", "changed", "other version", "no memory", "damaged memory", "a path", "foreign"]
)
def test_what_cannot_be_resumed_is_refused(embedded: Any, tokenizer: Tokenizer, tmp_path: Path, damage: str) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=4)
    session.say(LINES[0])
    session.save(tmp_path)
    path, (memory,) = tmp_path / "session.json", tmp_path.glob("memory-*")
    text = path.read_text()
    if damage == "nothing there":
        path.unlink()
    elif damage == "cut":
        path.write_text(text[:-20])
    elif damage == "changed":
        path.write_text(text.replace("Zoe", "Tom"))
    elif damage == "other version":
        path.write_text(text.replace('"version": 1', '"version": 2'))
    elif damage == "no memory":
        memory.unlink()
    elif damage == "damaged memory":
        memory.write_bytes(memory.read_bytes().replace(b"members", b"numbers"))
    elif damage == "a path":
        path.write_text(text.replace(memory.name, f"../{memory.name}"))
    elif damage == "foreign":
        embedded = load_talker("llama", tmp_path)
    engine = make_engine(embedded, tokenizer)
    with pytest.raises(FormatError):
        ChatSession.resume(engine, tmp_path)
    assert_all_given_back(engine)


def test_a_session_is_saved_with_its_branches_and_checkpoints(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """In another process, each branch continues as here.

    Going back computes no more than it did before.
    """
    engine = make_engine(embedded, tokenizer)
    session = ChatSession(engine, max_tokens=20)
    session.say(LINES[0])
    branch = session.branch()
    branch.edit(0, "My cat is called Rocky.")
    session.say(LINES[2])
    twig = branch.branch()
    twig.say("I live in Rome.")
    gone = session.branch()
    gone.close()
    assert session.branches == (branch, twig) and twig.branches == (session, branch)
    session.save(tmp_path)
    folder_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())

    other = make_engine(embedded, tokenizer)
    resumed = ChatSession.resume(other, tmp_path)
    assert [own.messages for own in (resumed, *resumed.branches)] == [own.messages for own in (session, branch, twig)]
    assert sum(own.sequence.length for own in (resumed, *resumed.branches) if own.sequence is not None) > 0
    for own, loaded in zip((session, branch, twig), (resumed, *resumed.branches), strict=True):
        here, there = own.say(LINES[3]), loaded.say(LINES[3])
        assert (there.text, there.n_reused, there.n_prompt) == (here.text, here.n_reused, here.n_prompt)
    here, there = session.edit(2, LINES[1]), resumed.edit(2, LINES[1])
    assert (there.text, there.n_reused) == (here.text, here.n_reused) and here.n_reused > 0
    assert other.prefixes is not None and other.prefixes.stats().n_checkpoints > 0

    resumed.save(tmp_path / "again")
    alone = ChatSession.resume(make_engine(embedded, tokenizer), tmp_path / "again")
    assert len(alone.branches) == 2 and alone.messages == resumed.messages
    twig.save(tmp_path / "twig")
    assert ChatSession.resume(make_engine(embedded, tokenizer), tmp_path / "twig").messages == twig.messages
    # Both branches share their first blocks with the session. The file holds these blocks once.
    apart = 0
    for own in (session, branch, twig):
        assert own.sequence is not None
        engine.memory.save(own.sequence, tmp_path / "one", checkpoints=False)
        apart += (tmp_path / "one").stat().st_size
    assert folder_bytes < 3 * apart


def test_a_damaged_branch_is_computed_again(embedded: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=20)
    session.say(LINES[0])
    branch = session.branch()
    branch.say(LINES[2])
    session.save(tmp_path)
    (memory,) = tmp_path.glob("memory-*")
    memory.write_bytes(memory.read_bytes()[:-1] + b"?")
    engine = make_engine(embedded, tokenizer)
    with pytest.warns(UserWarning, match="damaged and loaded without .*fork '1'"):
        resumed = ChatSession.resume(engine, tmp_path)
    (again,) = resumed.branches
    assert resumed.sequence is not None and again.sequence is None
    assert again.say(LINES[3]).text == "Your cat is called Zoe."


def test_without_room_for_all_branches_the_session_alone_is_remembered(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=8)
    session.say(LINES[0])
    for i in range(12):
        session.branch().edit(0, f"I have {i + 3} cats. {LINES[2]} {LINES[0]}")
    session.save(tmp_path)
    options = {"rollback_window": 8, "page_tokens": 4}
    memory = HybridMemory(embedded.memory_spec, 4 * session.engine.memory.needed_bytes(60), **options)  # type: ignore[arg-type]
    resumed = ChatSession.resume(Engine(embedded, memory, tokenizer), tmp_path)
    assert resumed.sequence is not None and {branch.sequence for branch in resumed.branches} == {None}
    assert len(resumed.branches) == 12
    memory.check()


def test_a_save_that_fails_leaves_the_old_one(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=20)
    session.say(LINES[0])
    session.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    session.say(LINES[2])
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        session.save(tmp_path)
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert len(ChatSession.resume(session.engine, tmp_path).messages) == 2


# The tests below talk.


def test_it_remembers_and_streams(embedded: Any, tokenizer: Tokenizer) -> None:
    session = ChatSession(make_engine(embedded, tokenizer))
    assert session.say(LINES[0]).text == "Okay, noted."
    pieces: list[str] = []
    turn = session.say(LINES[3], on_text=pieces.append)
    assert (
        turn.text == "".join(pieces) == "Your cat is called Zoe." and len(pieces) > 1 and turn.finish_reason == "stop"
    )
    assert session.edit(0, "My cat is called Rocky.").text == "Okay, noted."
    assert session.say(LINES[3]).text == "Your cat is called Rocky."
    session.undo()
    session.undo()
    assert session.messages == () and session.say(LINES[3]).text == "You have not told me that."


def test_regenerating_with_another_seed_says_something_else(embedded: Any, tokenizer: Tokenizer) -> None:
    session = ChatSession(make_engine(embedded, tokenizer), max_tokens=12, sampling=Sampling(3.0, seed=0))
    said = {session.say(LINES[0]).token_ids}
    said |= {session.regenerate(sampling=Sampling(3.0, seed=seed)).token_ids for seed in range(1, 4)}
    assert len(said) > 1
    first = session.regenerate(sampling=Sampling(3.0, seed=0), max_tokens=3)
    assert len(first.token_ids) == 3 and first.token_ids == session.regenerate(max_tokens=3).token_ids


def test_what_fails_leaves_the_messages_as_they_were(embedded: Any, tokenizer: Tokenizer) -> None:
    session = ChatSession(make_engine(embedded, tokenizer))
    session.say(LINES[0])
    messages = session.messages
    counted(session).fails_in = 2
    with pytest.raises(RuntimeError, match="broke"):
        session.say(LINES[2])
    counted(session).fails_in = None

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    def fail(piece: str) -> None:
        raise ValueError("no more")

    for hear, error in ((interrupt, KeyboardInterrupt), (fail, ValueError)):
        with pytest.raises(error):
            session.edit(0, "My cat is called Tom.", on_text=hear)
    with pytest.raises(StepError, match="middle"):
        session.say(LINES[2], on_text=lambda _: session.say("and now?"))  # type: ignore[arg-type, func-returns-value]
    for arguments in ((7,), ("x", 1), ("x", 9)):
        with pytest.raises(BatchError):
            session.say(*arguments) if len(arguments) == 1 else session.edit(arguments[1], arguments[0])  # type: ignore[arg-type, misc]
    with pytest.raises(BatchError):
        session.say("x", max_tokens=-1)
    assert session.messages == messages and session.engine.is_idle
    session.engine.memory.check()
    assert session.say(LINES[3]).text == "Your cat is called Zoe."
    session.close()
    assert_all_given_back(session.engine)


def test_no_room_is_said_and_survived(embedded: Any, tokenizer: Tokenizer) -> None:
    session = ChatSession(make_engine(embedded, tokenizer, budget="700KiB"), max_tokens=20)
    session.say(LINES[0])
    with pytest.raises(CapacityError):
        session.say(LINES[1] * 60)
    session.engine.memory.check()
    assert len(session.messages) == 2 and session.say(LINES[3]).text == "Your cat is called Zoe."


def test_what_was_never_said_cannot_be_taken_back(embedded: Any, tokenizer: Tokenizer) -> None:
    session = ChatSession(make_engine(embedded, tokenizer))
    for call in (session.undo, session.regenerate):
        with pytest.raises(BatchError, match="say something first"):
            call()
    with pytest.raises(BatchError, match="edit one of"):
        session.edit(0, "hello")
    session.close()
    session.close()
    for call in (session.undo, session.branch, session.sleep, lambda: session.say("hello")):
        with pytest.raises(SequenceError, match="closed"):
            call()


def test_tokenizers_without_a_usable_template_are_refused(embedded: Any) -> None:
    bare = load_tokenizer(EMBEDDED)
    bare.chat_template = None
    with pytest.raises(
        FormatError, match=r"no chat template, so it only continues texts.*/v1/completions; to chat, set"
    ):
        ChatSession(make_engine(embedded, bare))
    strict = load_tokenizer(EMBEDDED)
    strict.chat_template = strict.chat_template.replace("'system'", "'none'")
    with pytest.raises(FormatError, match="only the roles"):
        ChatSession(make_engine(embedded, strict), system="Be brief.")
    memory = HybridMemory(embedded.memory_spec, "16MiB")
    with pytest.raises(FormatError, match="no tokenizer"):
        ChatSession(Engine(embedded, memory, None))


def test_a_session_whose_sequence_was_closed_computes_it_again(embedded: Any, tokenizer: Tokenizer) -> None:
    """Only its messages count.

    Whatever is called next, the session continues as if nothing had been computed yet.
    """
    told = "My cat is called Milo."
    calls: list[Callable[[ChatSession], object]] = [
        lambda session: session.say("What is my cat called?").text,
        lambda session: session.regenerate().text,
        lambda session: session.edit(0, "My cat is called Luna.").text,
        lambda session: session.undo(),
        lambda session: session.branch().say("What is my cat called?").text,
        lambda session: session.sleep(),
        lambda session: session.wake(),
        lambda session: (session.close(), session.messages),
    ]
    for call in calls:
        engines = [make_engine(embedded, tokenizer, has_prefixes=False) for _ in range(2)]
        whole, robbed = (ChatSession(engine) for engine in engines)
        for session in (whole, robbed):
            session.say(told)
        assert robbed.sequence is not None
        robbed.engine.memory.close(robbed.sequence)
        assert robbed.sequence is None and "nothing computed yet" in repr(robbed)
        assert call(robbed) == call(whole) and robbed.messages == whole.messages
        for session in (whole, robbed):
            session.close()
        engines[1].memory.check()


def test_a_session_whose_sequence_was_closed_is_saved_and_says_why_it_computes(
    embedded: Any, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    engine = make_engine(embedded, tokenizer, has_prefixes=False)
    session = ChatSession(
        engine, messages=[{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello."}]
    )
    session.say("My cat is called Milo.")
    assert session.sequence is not None
    engine.memory.close(session.sequence)
    session.save(tmp_path / "chat")
    resumed = ChatSession.resume(engine, tmp_path / "chat")
    assert resumed.messages == session.messages and resumed.sequence is None
    turn = session.say("What is my cat called?")
    assert turn.n_reused == 0 and set(turn.computed) <= {NO_CHECKPOINT, NEW, LAST} and turn.computed[NO_CHECKPOINT] > 10
    for each in (session, resumed):
        each.close()
    assert_all_given_back(engine)
