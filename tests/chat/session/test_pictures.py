"""In sessions with pictures, every way to continue equals computing the conversation again."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.output import Output
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session.session import ChatSession
from hybridmem.memory import BatchError, HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import is_soft
from hybridmem.models import UnsupportedModelError, load_model
from hybridmem.models.vision.pictures import Pictures, pictures_of
from tests.extent import IS_LONG, only_in_long
from tests.models.seeing import MARKS, PROCESSORS, SPECIAL, WRITERS, as_png, draw_picture, write_minicpm_v
from tests.speaker import speaker, tokenizer_of_speaker
from tests.tolerances import assert_split_close

WIDE, TALL = draw_picture(1, 72, 40), draw_picture(2, 24, 64)


CLASSES = list(WRITERS) if IS_LONG else ["qwen3.5", "minicpm-v-4.6"]
"""Models with which a conversation with a picture is tried; qwen3.5 alone with the rest."""


@dataclass(frozen=True)
class Seeing:
    folder: Path
    tokenizer: Any

    def engine(self, budget: str = "64MiB") -> Engine:
        model: Any = load_model(self.folder)
        if (processor := PROCESSORS.get(type(model).__name__)) is not None:
            model.pictures.processor = processor()
        memory = HybridMemory(model.memory_spec, budget, rollback_window=16, poison=True)
        return Engine(model, memory, self.tokenizer, prefixes=PrefixCache(memory), stop_ids=())


@pytest.fixture(scope="module")
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    """The model that `seeing` is parametrized with, and a tokenizer that has the special tokens of all of them."""
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer: Any = copy.deepcopy(tokenizer_of_speaker())
    names = [name for name in SPECIAL if name.startswith("<")]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    n = len(tokenizer)
    WRITERS[getattr(request, "param", "qwen3.5")](folder, placeholder=n, vocab_size=n + 50)
    return Seeing(folder, tokenizer)


def assert_as_recomputed(session: ChatSession) -> None:
    """Assert that the live sequence gives the logits of a memory that is fed the same tokens anew."""
    engine, live = session.engine, session.sequence
    assert live is not None
    ids = live.tokens.tolist()
    fork = engine.memory.fork(live)
    again = HybridMemory(engine.memory.spec, "64MiB", rollback_window=16)
    expected = again.run(engine.model, {again.open(): [*ids, 7]})
    logits = engine.memory.run(engine.model, {fork: [7]})
    engine.memory.close(fork)
    engine.memory.check()
    assert logits is not None and expected is not None
    assert_split_close(logits, expected)


def talk(engine: Engine) -> ChatSession:
    """Take five turns, with a picture in the second."""
    session = ChatSession(engine, max_tokens=5)
    for turn, text in enumerate(["one", "two", "three", "four", "five"]):
        session.say(text, pictures=[WIDE] if turn == 1 else [])
    return session


@only_in_long
@pytest.mark.parametrize("seeing", CLASSES, indirect=True)
def test_a_picture_in_the_second_of_five_turns(seeing: Seeing, tmp_path: Path) -> None:
    engine = seeing.engine()
    pictures = pictures_of(engine.model)
    session = talk(engine)
    assert_as_recomputed(session)
    assert session.regenerate().n_reused > 0
    assert_as_recomputed(session)
    branch = session.branch()
    for _ in range(3):
        branch.undo()
    turn = branch.say("instead")
    n_rows = len(pictures.read(WIDE))
    assert turn.n_reused > n_rows  # The branches share what was computed of the picture.
    assert_as_recomputed(branch)
    session.save(tmp_path)
    session.edit(0, "another beginning")  # Only the first turn is left, and it is said again in other words.
    session.say("two", pictures=[WIDE])
    assert_as_recomputed(session)
    assert pictures.n_computed == 1

    elsewhere = seeing.engine()
    resumed = ChatSession.resume(elsewhere, tmp_path)
    (other,) = resumed.branches
    assert resumed.say("six").n_reused > n_rows and other.say("more").n_reused > n_rows
    for each in (resumed, other):
        assert_as_recomputed(each)
    assert pictures_of(elsewhere.model).n_computed == 0
    resumed.edit(2, "two again")  # The edited message stands before its own picture, which it keeps.
    assert_as_recomputed(resumed)


def test_a_saved_picture_is_computed_again_where_its_rows_are_lost(seeing: Seeing, tmp_path: Path) -> None:
    session = talk(seeing.engine())
    assert session.sequence is not None
    session.engine.memory.close(session.sequence)
    session.save(tmp_path)
    elsewhere = seeing.engine()
    resumed = ChatSession.resume(elsewhere, tmp_path)
    resumed.say("six")
    assert_as_recomputed(resumed)
    assert pictures_of(elsewhere.model).n_computed == 1


def test_pictures_of_minicpm_v_are_numbered_and_line_breaks_behind_them_take_no_position(tmp_path: Path) -> None:
    tokenizer: Any = copy.deepcopy(tokenizer_of_speaker())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_id>", "</image_id>"]})
    n, line_break = len(tokenizer), tokenizer.convert_tokens_to_ids("Ċ")
    marks = {name: n + i for i, name in enumerate(MARKS, 1)} | {"newline_id": line_break}
    write_minicpm_v(tmp_path, placeholder=n, marks=marks, vocab_size=n + 6)

    def begin() -> Engine:
        model: Any = load_model(tmp_path)
        memory = HybridMemory(model.memory_spec, "64MiB", rollback_window=16, poison=True)
        return Engine(model, memory, tokenizer, prefixes=PrefixCache(memory), stop_ids=())

    session = ChatSession(begin(), max_tokens=3)
    session.say("\nwhat?", pictures=[WIDE])
    session.say("this?", pictures=[TALL])
    assert_as_recomputed(session)
    assert session.sequence is not None
    ids = session.sequence.tokens.tolist()
    begin_id, end_id = tokenizer.convert_tokens_to_ids(["<image_id>", "</image_id>"])
    numbers = [ids[i + 1] for i, id in enumerate(ids) if id == begin_id and ids[i + 2] == end_id]
    assert numbers == tokenizer.convert_tokens_to_ids(["0", "1"])
    assert line_break not in ids and len({id for id in ids if is_soft(id)}) == 1 + sum(
        len(pictures_of(session.engine.model).read(image)) for image in (WIDE, TALL)
    )
    session.save(tmp_path / "kept")
    resumed = ChatSession.resume(begin(), tmp_path / "kept")
    resumed.edit(0, "\nwhich?")
    assert_as_recomputed(resumed)


def test_pictures_with_the_same_number_of_rows_share_no_prefix(seeing: Seeing) -> None:
    engine = seeing.engine()
    first, second = ChatSession(engine, max_tokens=2), ChatSession(engine, max_tokens=2)
    first.say("what is this?", pictures=[WIDE])
    other = second.say("what is this?", pictures=[draw_picture(9, *WIDE.size)])
    third = ChatSession(engine, max_tokens=2).say("what is this?", pictures=[as_png(WIDE)])
    fourth = ChatSession(engine, max_tokens=2, owner="bob").say("what is this?", pictures=[WIDE])
    assert other.n_reused < 20 < third.n_reused and fourth.n_reused == 0
    assert pictures_of(engine.model).n_computed == 2


def test_choices_of_one_prompt_share_its_picture(seeing: Seeing) -> None:
    engine = seeing.engine()
    picture = pictures_of(engine.model).read(TALL)
    prompt = [7, *picture.token_ids(), 8]
    sampling = [Sampling(temperature=1.0, seed=seed, repetition_penalty=1.2) for seed in range(3)]
    replies = engine.submit_choices(prompt, sampling, max_tokens=8)
    engine.run()
    assert engine.stats.n_fed < 2 * len(prompt)
    for reply, each in zip(replies, sampling, strict=True):
        alone = engine.submit(prompt, sampling=each, max_tokens=8, owner="alone")
        engine.run()
        assert alone.token_ids == reply.token_ids and len(reply.token_ids) == 8


def test_drafts_and_scores_leave_pictures_alone(seeing: Seeing) -> None:
    engine = seeing.engine()
    picture = pictures_of(engine.model).read(TALL)
    prompt = [7, 8, 9, *picture.token_ids(), 7, 8, 9]
    with pytest.raises(BatchError, match="cannot be scored"):
        engine.submit(prompt, output=Output(prompt_logprobs=0))
    prediction = engine.submit(prompt, prediction=[5, 6, 7], max_tokens=4)
    engine.run()
    assert prediction.error is None


def test_a_request_holds_its_pictures_until_it_ends(seeing: Seeing) -> None:
    """This holds however many others come meanwhile.

    The table keeps no picture that nobody holds.
    """
    engine = seeing.engine()
    pictures: Pictures = pictures_of(engine.model)
    pictures.soft_tokens.kept_bytes = 0
    prompt = [7, *pictures.read(TALL).token_ids(), 8]
    with pytest.raises(BatchError, match="give the picture again"):
        engine.submit(prompt)
    held = pictures.read(TALL)
    generation = engine.submit([7, *held.token_ids(), 8], max_tokens=2)
    del held
    engine.run()
    assert generation.error is None


def test_a_model_that_reads_text_alone_refuses_by_name() -> None:
    model = speaker()
    memory = HybridMemory(model.memory_spec, "4MiB")
    session = ChatSession(Engine(model, memory, tokenizer_of_speaker()))
    with pytest.raises(UnsupportedModelError, match="speaker reads text alone"):
        session.say("what is this?", pictures=[WIDE])
    assert session.messages == ()
