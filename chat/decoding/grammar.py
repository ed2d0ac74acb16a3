"""Constrains replies to a grammar: which tokens may come next is asked of llguidance, for all rows of a step at once.

A `Grammar` is read once and gives each reply a `Matcher`, which stands where the reply stands. llguidance is in the
extra `grammar` and is imported when the first grammar is read.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from chat.decoding.dates import with_exact_dates
from memory import BatchError, SpecError

WHITESPACE = r"(\n {0,16}| )?"
"""Between the signs of JSON: what people and models write, and no more, or nothing else might ever be written."""
_LEAST_PARALLEL = 1 << 20
"""Tokens times rows: to wake threads takes longer than smaller masks."""
_MOST_KEPT = 256
"""Grammars of which the compiled form is kept, the most recently used ones."""


class GrammarError(BatchError):
    """Says why a grammar cannot be enforced."""


class Grammars:
    """Reads grammars for one tokenizer, and keeps the most recent ones compiled. May be used from any thread.

    Args:
        tokenizer: one of transformers' fast tokenizers.
        n_vocab: tokens of the model's logits.
        stop_ids: tokens that may end a reply where the grammar allows an end.
    """

    def __init__(self, tokenizer: Any, n_vocab: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._stop_ids = list(stop_ids)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Any) -> Grammar:
        """Return the grammar of JSON that is valid by a schema (JSON Schema, draft 2020-12).

        Raises GrammarError: the schema has what cannot be enforced; the error names it.
        """
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise GrammarError(f"a schema must be an object, such as {{'type': 'object'}}, not {schema!r}")
        return self.lark(f"start: {json_rule(schema)}")

    def regex(self, pattern: str) -> Grammar:
        """Return the grammar of texts that match a pattern as a whole. Raises GrammarError."""
        return self._read(_library().LLMatcher.grammar_from_regex(pattern))

    def choice(self, texts: Sequence[str]) -> Grammar:
        """Return the grammar of a few texts."""
        return self.lark("start: " + " | ".join(map(json.dumps, texts)))

    def lark(self, text: str) -> Grammar:
        """Return a grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (`root ::= ...`).

        Raises GrammarError.
        """
        if "::=" in text:
            try:
                text = str(import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text))
            except Exception as error:  # its parser raises what comes
                raise GrammarError(f"this GBNF grammar cannot be read: {error}") from None
        return self._read(_library().LLMatcher.grammar_from_lark(text))

    def _read(self, source: str) -> Grammar:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        matcher = _library().LLMatcher(self._vocabulary, source, log_level=0)
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        grammar = Grammar(matcher, self._signs)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    @cached_property
    def _vocabulary(self) -> Any:
        """Return the tokens as llguidance knows them. Cost: about a second for 150,000 tokens."""
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise SpecError("grammars need a fast tokenizer, with a tokenizer.json; this one has none")
        hf = import_module("llguidance.hf")
        return hf.from_tokenizer(self._tokenizer, n_vocab=self._n_vocab, eos_token=self._stop_ids or None)

    @cached_property
    def _signs(self) -> dict[str, int]:
        """Return the ids of single signs that have a token of their own."""
        ids = {sign: self._vocabulary.tokenize_str(sign) for sign in '"}],a'}
        ends = {f"end {i}": i for i in self._stop_ids}
        return {sign: found[0] for sign, found in ids.items() if len(found) == 1} | ends


class Grammar:
    """Is a grammar that was read; any number of replies may follow it."""

    def __init__(self, matcher: Any, signs: dict[str, int]) -> None:
        self._matcher = matcher
        self._signs = signs

    def matcher(self) -> Matcher:
        """Return a matcher for one reply, at its beginning."""
        return Matcher(self._matcher.deep_copy(), self._signs)


class Matcher:
    """Stands where one reply stands in its grammar.

    Attributes:
        library: llguidance's matcher.
    """

    def __init__(self, library: Any, signs: dict[str, int]) -> None:
        self.library = library
        self._signs = signs

    def copy(self) -> Matcher:
        return Matcher(self.library.deep_copy(), self._signs)

    def add(self, token_id: int) -> None:
        """Go on by a token that was chosen."""
        self.library.consume_token(token_id)

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Count the leading tokens that could follow, one after the other; nothing changes."""
        return int(self.library.validate_tokens(list(token_ids)))

    @property
    def is_accepting(self) -> bool:
        """True if the reply may end here."""
        return bool(self.library.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """True if the reply cannot go on."""
        return bool(self.library.is_stopped())

    @property
    def error(self) -> str | None:
        """Why the grammar cannot be followed any further; None: it can."""
        return _short(self.library.get_error()) if self.library.is_error() else None

    def closing_ids(self) -> list[int]:
        """Return the tokens that bring the reply nearer to its end: an end token, or the sign that closes a string, an
        object or a list, or separates what must follow.
        """
        if self.is_accepting:
            return [i for sign, i in self._signs.items() if sign.startswith("end ")]
        bits = np.frombuffer(self.library.compute_bitmask(), np.uint8)
        allowed = {sign: i for sign, i in self._signs.items() if bits[i >> 3] >> (i & 7) & 1}
        is_in_string = {"}", "]", "a"} <= allowed.keys()
        for signs in ('"',) if is_in_string else ("}]", '"', ","):
            if found := [allowed[sign] for sign in signs if sign in allowed]:
                return found
        return []


def json_rule(schema: dict[str, Any]) -> str:
    """Return JSON by a schema as a part of a rule in Lark."""
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE} | (own if isinstance(own, dict) else {})
    return "%json " + json.dumps(with_exact_dates(schema) | {"x-guidance": options})


def mask_rows_(scores_SV: Tensor, matchers: Sequence[tuple[int, Matcher]]) -> None:
    """Rule out, in these rows, tokens that do not fit the row's grammar; in place.

    Cost: some 10 to 100 us a row, without the interpreter's lock; large ones in several threads.
    """
    n_rows, n_vocab = len(matchers), scores_SV.shape[1]
    bits = np.zeros((n_rows, (n_vocab + 31) // 32), np.int32)
    address, n_bytes = bits.ctypes.data, bits.shape[1] * 4
    if n_rows * n_vocab < _LEAST_PARALLEL:
        for i, (_, matcher) in enumerate(matchers):
            matcher.library.unsafe_compute_mask_ptr(address + i * n_bytes, n_bytes)
    else:
        pairs = [(matcher.library, i) for i, (_, matcher) in enumerate(matchers)]
        _executor().unsafe_compute_mask_ptr(pairs, address, n_bytes, n_rows)
    is_out = np.unpackbits(~bits.view(np.uint8), axis=1, count=n_vocab, bitorder="little").view(np.bool_)
    out_SV = torch.from_numpy(is_out).to(scores_SV.device)
    if n_rows == len(scores_SV):
        scores_SV.masked_fill_(out_SV, -torch.inf)
        return
    rows = [row for row, _ in matchers]
    scores_SV[rows] = scores_SV[rows].masked_fill(out_SV, -torch.inf)


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise SpecError('grammars need llguidance; pip install "hybrid-memory[grammar]"') from None


@lru_cache(1)
def _executor() -> Any:
    return _library().LLExecutor()


def _short(error: str) -> str:
    """Return what an error of llguidance says, without the place in the grammar that was made, which it quotes."""
    said = re.split(r"\n\s*\d+ \|", error)[0]
    said = re.sub(r"Unimplemented keys: \[(.*?)\]", r"these keys cannot be enforced: \1", said)
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said).split())[:300]
