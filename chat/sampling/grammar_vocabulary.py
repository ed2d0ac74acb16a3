"""Gives llguidance a vocabulary in which text is never taken for a token that was added to it.

Where a grammar allows only one text, llguidance asks the tokenizer for the tokens of that text. The text may contain
the name of an added token, such as the choice "<filename>". The tokenizer would encode it as that token, but a
grammar's text must stay plain text. So the added tokens get names that nobody can write. Grammars refer to them by
their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s\[][^<>\n]*>')
"""What a grammar consists of: strings, comments and patterns, in which names mean nothing, and names of tokens."""


def with_hidden_names(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON, with other names for its added tokens. Their ids stay."""
    described = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    secret = uuid4().hex
    names = {token["content"]: f"<|{secret}{token['id']}|>" for token in described["added_tokens"]}
    for token in described["added_tokens"]:
        token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = described["model"]
    _rename(model, names)
    # A post-processor names the special tokens that it adds around a text. This tokenizer never adds any.
    described["post_processor"] = None
    return json.dumps(described, ensure_ascii=False, separators=(",", ":"))


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename the added tokens that also occur in the vocabulary of the tokenizer's model."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): i for word, i in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    if isinstance(merges := model.get("merges"), list):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        # Words are made by merges. So a longer word can contain an added token's name only if a merge makes that name.
        if any(a + b in names for a, b in pairs):
            pairs = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
        model["merges"] = pairs


def with_ids(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in which tokens are named by their ids: <[5]> instead of <think>."""

    def replaced(found: re.Match[str]) -> str:
        token_id = token_ids.get(found[0]) if found[0].startswith("<") else None
        return found[0] if token_id is None else f"<[{token_id}]>"

    return _PARTS.sub(replaced, lark)
