"""A prompt and its reply end at the model's context, in the engine, in chats and on the command line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PretrainedConfig
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.engine.context import named_context_tokens
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session.session import ChatSession
from hybridmem.memory import BatchError, HybridMemory, SpecError
from hybridmem.models import EMBEDDED, load_model
from tests.toy import Toy

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def make_engine(context_tokens: int | None = None, named: int | None = 40) -> Engine:
    model: Any = Toy()
    model.config = SimpleNamespace() if named is None else SimpleNamespace(max_position_embeddings=named)
    return Engine(model, HybridMemory(model.memory_spec, "1MiB"), None, stop_ids=(), context_tokens=context_tokens)


def test_a_reply_ends_with_the_context() -> None:
    """This also holds for a reply that continues a sequence, and for each of several choices."""
    engine = make_engine()
    whole, one = engine.submit([1] * 30, max_tokens=100, keeps_sequence=True), engine.submit([1] * 39, max_tokens=100)
    choices = engine.submit_choices([1] * 35, [Sampling(), Sampling()], max_tokens=100)
    engine.run()
    assert [len(each.token_ids) for each in (whole, one, *choices)] == [10, 1, 5, 5]
    assert {each.finish_reason for each in (whole, one, *choices)} == {"length"}
    assert whole.sequence is not None and whole.sequence.length == 39
    with pytest.raises(BatchError, match=r"maximum context length is 40 tokens\. However, the prompt has 41"):
        engine.submit([1, 2], sequence=whole.sequence)
    fed = engine.submit([1], sequence=whole.sequence, max_tokens=0)
    engine.run()
    assert (fed.n_base, fed.token_ids, fed.error) == (39, [], None)


def test_who_knows_better_names_the_context() -> None:
    assert make_engine().context_tokens == 40 and make_engine(named=None).context_tokens is None
    engine = make_engine(context_tokens=60)
    generation = engine.submit([1] * 50, max_tokens=100)
    engine.run()
    assert len(generation.token_ids) == 10
    with pytest.raises(SpecError, match="context_tokens"):
        make_engine(context_tokens=0)


@pytest.mark.parametrize(
    ("config", "n_tokens"),
    [
        ({}, None),
        ({"max_position_embeddings": 32768}, 32768),
        ({"max_position_embeddings": 32768, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_parameters": {**YARN, "rope_type": "llama3"}}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": {"full_attention": YARN}}, 131072),
    ],
)
def test_the_config_names_it(config: dict[str, Any], n_tokens: int | None) -> None:
    assert named_context_tokens(SimpleNamespace(**config)) == n_tokens
    text = PretrainedConfig()
    assert named_context_tokens(text) is None


def test_a_chat_says_that_it_is_full_and_stays_as_it_was() -> None:
    model, tokenizer = load_model(EMBEDDED), load_tokenizer(EMBEDDED)
    engine = Engine(model, HybridMemory(model.memory_spec, "64MiB"), tokenizer, context_tokens=120)
    session = ChatSession(engine)
    session.say("My cat is called Tom.")
    before = session.messages
    with pytest.raises(BatchError, match="maximum context length is 120 tokens"):
        session.say("My cat is called Tom. " * 40)
    assert session.messages == before
    assert "Tom" in session.say("What is my cat called?").text
    session.close()


def test_generate_refuses_what_does_not_fit() -> None:
    result = CliRunner().invoke(app, ["generate", "--prompt", "My cat is called Tom. " * 1000])
    assert result.exit_code == 1 and "maximum context length is 4096 tokens" in " ".join(result.stderr.split())
