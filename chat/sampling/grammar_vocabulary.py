"""Gives llguidance a vocabulary in which text is never taken for a token that was added to it.

Where a grammar leaves only one text, llguidance asks the tokenizer for its tokens. That text may hold the name of an
added token, such as the choice "<filename>". A tokenizer would find the token there, which the text of a grammar must
not be. So the added tokens get names that nobody can write. Grammars name them by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from typing import Any
from uuid import uuid4

_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s\[][^<>\n]*>')
"""What a grammar consists of: strings, comments and patterns, in which names mean nothing, and names of tokens."""


def with_hidden_names(tokenizer: Any) -> str:
    """Return a fast tokenizer as JSON, with other names for its added tokens. Their ids stay."""
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    described = json.loads(backend.to_str())
    secret = uuid4().hex
    names = {token["content"]: f"<|{secret}{token['id']}|>" for token in described["added_tokens"]}
    for token in described["added_tokens"]:
        token |= {"content": names[token["content"]], "normalized": False, "single_word": False}
    model = described["model"]
    _rename(model, names)
    # These add tokens around a text, by their names. They are never asked to.
    described["post_processor"] = None
    return json.dumps(described)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename the added tokens that the model of a tokenizer has among its own."""
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(word, word): i for word, i in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(word, word), score] for word, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    if isinstance(merges := model.get("merges"), list):
        pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]


def with_ids(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in which tokens are named by their ids: <[5]> instead of <think>."""

    def replaced(found: re.Match[str]) -> str:
        token_id = token_ids.get(found[0]) if found[0].startswith("<") else None
        return found[0] if token_id is None else f"<[{token_id}]>"

    return _PARTS.sub(replaced, lark)
