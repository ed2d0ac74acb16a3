"""In templates, given text is read once and not generated, and choices are compared exactly.

Each row of a batch is filled as it would be alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridmem.chat.engine.engine import Engine, Sampling
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.session.history import decode
from hybridmem.chat.session.template import Filled, Hole, Template, Text, fill
from hybridmem.memory import BatchError, CapacityError, HybridMemory
from tests.chat.talking import TALKERS, Counted, assert_all_given_back, decode_fresh, load_talker, make_engine
from tests.extent import few_cases

NAMES = "Milo Luna Zoe Oscar Ruby Nala Boris Clara Frank Greta Henry Karin Leo Maria Nora Tina".split()
ARTICLE = (
    "<|bos|><|user|>{question}<|end|><|assistant|>{answer:max_tokens=5,stop='.'}<|end|>"
    "<|user|>Are you sure?<|end|><|assistant|>{doubt:max_tokens=3} {score:choices=['low','high','not sure']}"
)


@pytest.fixture(scope="module", params=TALKERS)
def talker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_talker(request.param, tmp_path_factory.mktemp("talker"))


def counted(engine: Engine) -> Counted:
    assert isinstance(engine.model, Counted)
    return engine.model


def log_probability(model: Any, prompt: list[int], ids: list[int]) -> float:
    """Return the log probability of these tokens after the prompt, read in one step in a memory of its own."""
    memory = HybridMemory(model.memory_spec, "64MiB", poison=True)
    with memory.step({memory.open(): [*prompt, *ids[:-1]]}, outputs="all") as step:
        rows = model(step)[len(prompt) - 1 :].double().log_softmax(-1)
    return float(rows.gather(1, torch.tensor(ids)[:, None]).sum())


# The tests below fill templates.


@few_cases
@pytest.mark.parametrize("has_prefixes", [True, False])
def test_a_batch_of_sixteen_reads_each_token_once(talker: Any, tokenizer: Tokenizer, has_prefixes: bool) -> None:
    engine = make_engine(talker, tokenizer, has_prefixes=has_prefixes)
    pairs = zip(NAMES, NAMES[::-1], strict=True)
    rows = [{"question": f"My favourite name in all the world is {name}, and not {other}."} for name, other in pairs]
    filled = fill(engine, Template(ARTICLE), rows)
    model, n_tokens = counted(engine), sum(len(f.token_ids) for f in filled)
    # No token of a text, a value or a choice was computed twice in the same context.
    assert max(model.prefixes.values()) == 1
    assert engine.stats.n_fed == model.n_fed == len(model.prefixes) < n_tokens
    read = {f.token_ids[:n] for f in filled for n in range(1, len(f.token_ids) - len(tokenizer.encode("not sure")))}
    assert read <= set(model.prefixes)  # All of these prefixes were computed.
    assert_all_given_back(engine)
    for row, one in zip(rows, filled, strict=True):
        assert one.values["question"] == row["question"] and set(one.values) == {"question", "answer", "doubt", "score"}
        assert (one.reasons["question"], one.reasons["score"]) == ("given", "choice")
    for i in (0, 7, 15):
        alone = fill(make_engine(talker, tokenizer), Template(ARTICLE), [rows[i]])[0]
        assert (alone.text, alone.token_ids, alone.reasons) == (filled[i].text, filled[i].token_ids, filled[i].reasons)
        assert list(alone.scores["score"].values()) == pytest.approx(list(filled[i].scores["score"].values()), abs=1e-3)


def test_holes_say_what_the_model_says_there(talker: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(talker, tokenizer)
    holes = (Hole("first", max_tokens=4), Hole("second", max_tokens=3), Hole("third", max_tokens=2))
    parts = [Text("My cat is called Zoe."), holes[0], Text(" and then "), *holes[1:]]
    one = fill(engine, Template(parts))[0]
    tokens, n_said = list[int](), 0
    for part in parts:
        if isinstance(part, Text):
            tokens += tokenizer.encode(part.text)
            continue
        said = decode_fresh(talker, tokens, part.max_tokens, engine.stop_ids)
        words = [token for token in said if token not in engine.stop_ids]
        assert one.values[part.name] == decode(tokenizer, words) and one.reasons[part.name] == (
            "stop" if words != said else "length"
        )
        tokens += words
        n_said += len(said)
    assert list(one.token_ids) == tokens
    assert one.text == "".join(part.text if isinstance(part, Text) else one.values[part.name] for part in parts)
    assert one.n_generated == n_said
    assert_all_given_back(engine)


def test_known_values_are_not_generated(talker: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(talker, tokenizer)
    template = Template("My {animal} is called {name:max_tokens=3}. {name} is a {animal}{tail:max_tokens=2}!")
    given = {"animal": "cat", "name": "Zoe", "tail": " too"}
    one = fill(engine, template, given)[0]
    assert one.text == "My cat is called Zoe. Zoe is a cat too!" and set(one.reasons.values()) == {"given"}
    assert one.n_generated == counted(engine).n_fed == engine.stats.n_generated == 0
    some = fill(engine, template, {"animal": "cat", "name": "Zoe"})[0]
    assert (
        some.reasons == {"animal": "given", "name": "given", "tail": some.reasons["tail"]} and 0 < some.n_generated <= 2
    )
    n_read = sum(
        len(tokenizer.encode(words)) for words in ("My ", "cat", " is called ", "Zoe", ". ", "Zoe", " is a ", "cat")
    )
    assert counted(engine).n_fed == n_read + some.n_generated - 1  # The last word is chosen, but never fed.
    rest = fill(engine, template, {"animal": "cat"})[0]
    assert rest.text.count(rest.values["name"]) >= 2 and engine.stats.n_generated == some.n_generated + rest.n_generated
    assert_all_given_back(engine)


def test_choices_are_the_most_likely_ones(talker: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(talker, tokenizer)
    choices = ("Okay, noted.", "low", "You have not told me that.", "high")
    prompts = [f"<|bos|><|user|>My cat is called {name}.<|end|><|assistant|>" for name in NAMES[:3]]
    rest = [Hole("reply", choices=choices), Text("<|end|>"), Hole("more", max_tokens=2)]
    filled = fill(engine, [Template([Text(prompt), *rest]) for prompt in prompts])
    for prompt, one in zip(prompts, filled, strict=True):
        ids = tokenizer.encode(prompt)
        expected = {choice: log_probability(talker, ids, tokenizer.encode(choice)) for choice in choices}
        assert one.scores["reply"] == pytest.approx(expected, abs=1e-3)
        assert one.values["reply"] == max(expected, key=expected.__getitem__)
        behind = [*ids, *tokenizer.encode(one.values["reply"]), 2]
        assert list(one.token_ids[: len(behind)]) == behind
        said = decode_fresh(talker, behind, 2, engine.stop_ids)
        assert one.values["more"] == decode(tokenizer, said)
    assert_all_given_back(engine)


def test_the_embedded_model_fills_what_it_was_told(embedded: Any, tokenizer: Tokenizer) -> None:
    template = Template(
        "<|bos|><|user|>My cat is called{name}.<|end|><|assistant|>{reply:stop=','}, noted.<|end|><|user|>What is my "
        "cat called?<|end|><|assistant|>Your cat is called{answer:choices=[' Zoe',' Milo',' Luna']}{rest}"
    )
    names = (" Milo", " Luna")
    filled = fill(make_engine(embedded, tokenizer), template, [{"name": name} for name in names])
    for one, name in zip(filled, names, strict=True):
        assert one.values == {"name": name, "reply": "Okay", "answer": name, "rest": "."}
        assert one.reasons == {"name": "given", "reply": "stop", "answer": "choice", "rest": "stop"}


def test_a_stop_string_in_the_middle_of_a_token(talker: Any, tokenizer: Tokenizer) -> None:
    """The rest of the text is tokenised anew, and what follows continues from there."""
    engine = make_engine(talker, tokenizer)
    prompt, said = tokenizer.encode("My cat is called Zoe."), tokenizer.encode(" That sounds nice.")
    counted(engine).say(said, at=len(prompt))
    parts = [Text("My cat is called Zoe."), Hole("a", stop="unds", max_tokens=20), Text("!"), Hole("b", max_tokens=1)]  # type: ignore[arg-type]
    one = fill(engine, Template(parts))[0]
    assert (one.values["a"], one.reasons["a"]) == (" That so", "stop")
    assert one.text.startswith("My cat is called Zoe. That so!")
    assert decode(tokenizer, one.token_ids).startswith("My cat is called Zoe. That so!")
    assert_all_given_back(engine)


def test_sampled_holes_depend_on_their_seed(embedded: Any, tokenizer: Tokenizer) -> None:
    template = Template(
        [Text("My cat is called"), Hole("a", max_tokens=8), Text("!"), Hole("b", max_tokens=8, sampling=Sampling())]
    )
    engine = make_engine(embedded, tokenizer)
    first, again, other = (fill(engine, template, sampling=Sampling(4.0, seed=seed))[0] for seed in (1, 1, 2))
    assert first == again and first.values["a"] != other.values["a"]


def test_prefixes_of_earlier_batches_are_not_read_again(embedded: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(embedded, tokenizer)
    template = Template("<|bos|><|user|>My cat is called {name}.<|end|><|assistant|>{reply:max_tokens=2}")
    fill(engine, template, [{"name": "Milo"}, {"name": "Luna"}])
    n_fed, n_shared = engine.stats.n_fed, len(tokenizer.encode("<|bos|><|user|>My cat is called "))
    fill(engine, template, [{"name": "Zoe"}])
    n_own = sum(len(tokenizer.encode(words)) for words in ("Zoe", ".<|end|><|assistant|>"))
    assert engine.stats.n_fed - n_fed == n_own + 1 and n_shared > 4


def test_templates_of_all_sorts_share_a_batch(talker: Any, tokenizer: Tokenizer) -> None:
    """Some templates are equal, some begin with others, some have nothing in common, and some have nothing to do."""
    engine = make_engine(talker, tokenizer)
    written = [
        "My cat{a:max_tokens=3}",
        "My cat{a:max_tokens=3}",
        "My cat is called{a:max_tokens=2}",
        "What{a:max_tokens=2}?",
        "nothing",
    ]
    written.append("My{a:choices=['x','y']}")
    filled = fill(engine, [Template(text) for text in written])
    alone = [fill(make_engine(talker, tokenizer), Template(text))[0] for text in written]
    assert [(f.text, f.token_ids, f.reasons) for f in filled] == [(f.text, f.token_ids, f.reasons) for f in alone]
    assert filled[4] == Filled("nothing", {}, {}, {}, (), 0) and filled[0] == filled[1]
    assert_all_given_back(engine)
    assert fill(engine, []) == []


def test_what_fails_leaves_nothing_behind(embedded: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(embedded, tokenizer)
    counted(engine).fails_in = 3
    with pytest.raises(RuntimeError, match="broke"):
        fill(engine, Template(ARTICLE), [{"question": name} for name in NAMES])
    assert engine.is_idle
    assert_all_given_back(engine)
    small = make_engine(embedded, tokenizer, budget="700KiB")
    with pytest.raises(CapacityError):
        fill(small, Template("{text}{a}"), {"text": "It rained all morning. " * 200})
    assert_all_given_back(small)


# The tests below write templates.


def test_how_templates_are_written() -> None:
    template = Template(
        "{{Q}}: {question}\nA: {answer:max_tokens=20,stop='\n'}{ b : stop=['}', \"'\"], max_tokens=2 "
        "}{c:choices=['{','}}']}}}"
    )
    assert template.parts == (
        Text("{Q}: "), Hole("question"), Text("\nA: "), Hole("answer", max_tokens=20, stop=("\n",)),
        Hole("b", max_tokens=2, stop=("}", "'")), Hole("c", choices=("{", "}}")), Text("}"),
    )  # fmt: skip
    assert template.names == ("question", "answer", "b", "c")
    assert Template(list(template.parts)) == template and Template("").parts == ()


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("a } b", "closes nothing"),
        ("a {b", "not closed"),
        ("{a:stop='}", "cannot be read"),
        ("{1a}", "names no hole"),
        ("{}", "names no hole"),
        ("{a:max_tokens=0}", "max_tokens=0"),
        ("{a:max_tokens=True}", "max_tokens=True"),
        ("{a:stop=7}", "stop=7"),
        ("{a:choices=['x','x']}", "repeat"),
        ("{a:choices=['']}", "at least one character"),
        ("{a:temperature=1}", "no option 'temperature'"),
        ("{a:20}", "options '20'"),
        ("{a:max_tokens=f()}", "no literal"),
        ("{a:max_tokens=1} {a:max_tokens=2}", "stands twice"),
    ],
)
def test_what_makes_no_template_is_refused(written: str, words: str) -> None:
    with pytest.raises(BatchError, match=words):
        Template(written)


def test_values_that_make_no_sense_are_refused(embedded: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(embedded, tokenizer)
    for template, values, words in (
        (Template("x {a}"), {"b": "y"}, "no hole 'b'"),
        (Template("x {a}"), {"a": 7}, "no text"),
        (Template("{a}"), {}, "nothing stands before"),
        ([Template("x {a}")] * 2, [{}] * 3, "2 templates and 3 rows"),
    ):
        with pytest.raises(BatchError, match=words):
            fill(engine, template, values)  # type: ignore[arg-type]
    with pytest.raises(BatchError, match="no part"):
        Template([Text("x"), "y"])  # type: ignore[list-item]
    assert_all_given_back(engine)
