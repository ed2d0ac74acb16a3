"""A prompt continues a stored reply, although its template renders the history differently from what the model saw."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from hybridmem.chat.prompts import Tokenizer, encode_chat
from hybridmem.chat.server.sessions.prompting import History, find_base, make_prompt
from hybridmem.chat.stored.continuing import tokens_of_text
from hybridmem.chat.stored.items import text_item
from hybridmem.chat.stored.nodes import Node, new_id

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITHOUT_THOUGHTS = PLAIN.replace("{{ m.content }}", "{{ m.content.split('THOUGHT')[-1] }}")
LAST_FIRST = PLAIN.replace("{{ bos_token }}", "{{ bos_token }}{{ messages|length }}")
WITHOUT_END = PLAIN.replace("<|end|>", "")


@pytest.fixture
def texts(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> Tokenizer:
    """Return the tokenizer, with the template that a test names."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = request.param
    return own


def said(texts: Tokenizer, reply: str, *, ends: bool = True, instructions: str | None = None) -> tuple[list[Node], Any]:
    """Return a question and its reply, with the token ids that the model had: one for each letter."""
    question = Node(new_id("turn"), "s", None, "user", [text_item("user", "My cat")])
    prompt = encode_chat(texts, [{"role": "user", "content": "My cat"}])
    letters = [i for letter in reply for i in texts.encode(letter, add_special_tokens=False)]
    tokens = np.array([*prompt, *letters, *([texts.eos_token_id] if ends else [])])
    about = {"instructions": instructions}
    node = Node(
        new_id("resp"), "s", question.id, "assistant", [text_item("assistant", reply)], about=about,
        n_prompt=len(prompt), own_tokens=tokens,
    )  # fmt: skip
    return [question, node], tokens


def prompt_behind(texts: Tokenizer, path: list[Node], tokens: Any, *, parse_special: bool = False) -> Any:
    new = Node(new_id("turn"), "s", path[-1].id, "user", [text_item("user", "is <|end|> Zoe")])
    base, why = find_base(path, None)
    history = History([*path, new], None, base=base, tokens=tokens, why_no_base=why)
    return make_prompt(texts, history, (texts.eos_token_id,), parse_special=parse_special)


@pytest.mark.parametrize("texts", [PLAIN, WITHOUT_THOUGHTS, WITHOUT_END], indirect=True)
@pytest.mark.parametrize("ends", [True, False])
def test_it_begins_with_what_was_stored_bit_for_bit(texts: Tokenizer, ends: bool) -> None:
    path, tokens = said(texts, "aTHOUGHTb", ends=ends)
    prompt = prompt_behind(texts, path, tokens)
    assert prompt.token_ids[: len(tokens)] == tokens.tolist() and prompt.n_kept == len(tokens)
    rest = texts.decode(prompt.token_ids[len(tokens) :])
    end = "" if ends or texts.chat_template == WITHOUT_END else "<|end|>"
    after = "" if texts.chat_template == WITHOUT_END else "<|end|>"
    assert rest == f"{end}<|user|>is <|end|> Zoe{after}<|assistant|>"
    # The name of a special token that a user has written is text.
    assert (
        prompt.token_ids.count(texts.eos_token_id)
        == tokens.tolist().count(texts.eos_token_id) + rest.count("<|end|>") - 1
    )


@pytest.mark.parametrize("texts", [LAST_FIRST], indirect=True)
def test_a_template_that_rewrites_what_was_before_is_followed_and_it_says_so(texts: Tokenizer) -> None:
    path, tokens = said(texts, "ab")
    prompt = prompt_behind(texts, path, tokens)
    assert "renders what is before the earlier reply otherwise" in prompt.history
    messages = [{"role": node.role, "content": node.items[0]["content"][0]["text"]} for node in path]
    assert prompt.token_ids == encode_chat(texts, [*messages, {"role": "user", "content": "is <|end|> Zoe"}])
    assert 0 < prompt.n_kept < len(tokens) and prompt.token_ids[: prompt.n_kept] == tokens[: prompt.n_kept].tolist()


@pytest.mark.parametrize("texts", [PLAIN], indirect=True)
def test_other_instructions_or_an_edited_reply_are_no_base(texts: Tokenizer) -> None:
    path, _ = said(texts, "ab", instructions="Be kind.")
    assert find_base(path, None) == (None, "the instructions differ")
    assert find_base(path, "Be kind.")[0] is path[1]
    edited = Node(new_id("turn"), "s", path[0].id, "assistant", [text_item("assistant", "c")])
    assert "no token ids are known" in find_base([path[0], edited], None)[1]


def test_the_tokens_of_a_text_that_a_stop_string_has_cut() -> None:
    def decode(ids: list[int]) -> str:
        return "".join("abcdefgh"[2 * i : 2 * i + 2] for i in ids)

    assert tokens_of_text([0, 1, 2], "abcd", decode) == [0, 1]
    assert tokens_of_text([0, 1, 2], "abc", decode) is None
    assert tokens_of_text([0, 1], "", decode) == []
