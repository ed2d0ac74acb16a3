"""Constrains replies to a grammar. llguidance computes which tokens may come next.

A `Grammar` is read once. It gives each reply a `Matcher`, which knows where in the grammar the reply stands. llguidance
is in the extra `grammar`, and is imported when the first grammar is read.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np

from hybridmem.chat.sampling.dates import with_exact_dates
from hybridmem.chat.sampling.grammar_sandbox import Trial
from hybridmem.chat.sampling.grammar_vocabulary import with_hidden_names, with_ids
from hybridmem.chat.sampling.schema_numbers import LEAST, find_in_grammar
from hybridmem.memory import BatchError, SpecError, StepError

WHITESPACE = r"(\n {0,16}| )?"
"""The white space between the signs of JSON. It is limited to what people and models write: without a limit, a reply
could be nothing but white space.
"""
_INSIDE = "a0.:@/-"
"""Signs that a format or a pattern may require in a string before it may end, such as the @ of an address."""
_MOST_KEPT = 256
"""The compiled forms of at most this many grammars are kept: the most recently used ones."""


class GrammarError(BatchError):
    """Says why a grammar cannot be enforced."""


class DeadEndError(GrammarError, StepError):
    """Says why a reply cannot continue by its grammar."""


class Grammars:
    """Reads grammars for one tokenizer, and keeps the most recent ones compiled. Any thread may use it.

    Args:
        tokenizer: one of transformers' fast tokenizers.
        n_vocab: the number of tokens in the model's logits.
        stop_ids: tokens that may end a reply where the grammar allows an end.
        is_guarded: whether grammars come from strangers. If so, each is first compiled in a separate process (`Trial`).
    """

    def __init__(self, tokenizer: Any, n_vocab: int, stop_ids: Sequence[int], *, is_guarded: bool = False) -> None:
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._stop_ids = list(stop_ids)
        self._is_guarded = is_guarded
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Any) -> Grammar:
        """Return the grammar of JSON that is valid by a schema (JSON Schema, draft 2020-12).

        Raises GrammarError if something in the schema cannot be enforced. The error names it.
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
        """Return the grammar whose only replies are these texts."""
        return self.lark("start: " + " | ".join(map(json.dumps, texts)))

    def lark(self, text: str) -> Grammar:
        """Return a grammar in llguidance's dialect of Lark, or in llama.cpp's GBNF (`root ::= ...`).

        Raises GrammarError.
        """
        if "::=" in text:
            try:
                text = str(import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text))
            except Exception as error:  # The parser may raise anything.
                raise GrammarError(f"this GBNF grammar cannot be read: {error}") from None
        text = with_ids(text, self._token_ids)
        return self._read(_library().LLMatcher.grammar_from_lark(text), lark=text)

    def _read(self, source: str, lark: str = "") -> Grammar:
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        _check_numbers(lark)
        if (trial := self._trial) is not None:
            if (why := self._try(trial, source)) is not None:
                raise GrammarError(why)
        matcher = _library().LLMatcher(self._vocabulary, source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # This call fails if no reply can begin, as with {"$ref": "#"}.
        if matcher.is_error():
            raise GrammarError(_short(matcher.get_error()))
        grammar = Grammar(matcher, self._signs, (self._n_vocab + 31) // 32, self._vocabulary)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _try(self, trial: Trial, source: str) -> str | None:
        """Return why a grammar cannot be used. The first time, the vocabulary is read while the process starts."""
        if "_vocabulary" in vars(self):
            return trial.why_not(source)
        reading = threading.Thread(target=lambda: self._vocabulary, daemon=True)
        reading.start()
        why = trial.why_not(source)
        reading.join()
        return why

    @cached_property
    def _vocabulary(self) -> Any:
        """Return the vocabulary as llguidance needs it. Cost: about a second for 150,000 tokens."""
        return _library().LLTokenizer(self._described, n_vocab=self._n_vocab, eos_token=self._stop_ids or None)

    @cached_property
    def _described(self) -> str:
        if not hasattr(self._tokenizer, "backend_tokenizer"):
            raise SpecError("grammars need a fast tokenizer, with a tokenizer.json; this one has none")
        return with_hidden_names(self._tokenizer)

    @cached_property
    def _token_ids(self) -> dict[str, int]:
        """Return the ids of the tokens that were added to the vocabulary, by their names."""
        return {token.content: i for i, token in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _trial(self) -> Trial | None:
        if not self._is_guarded or not hasattr(self._tokenizer, "backend_tokenizer"):
            return None
        return Trial(self._described, self._n_vocab, self._stop_ids)

    def close(self) -> None:
        """End the process that tries grammars, if there is one."""
        if (trial := self.__dict__.get("_trial")) is not None:
            trial.close()

    @cached_property
    def _signs(self) -> dict[str, int]:
        """Return the ids of the tokens that are a single character."""
        ids = {sign: self._vocabulary.tokenize_str(sign) for sign in '"}],' + _INSIDE}
        ends = {f"end {i}": i for i in self._stop_ids}
        return {sign: found[0] for sign, found in ids.items() if len(found) == 1} | ends


class Grammar:
    """Holds a grammar that was read. Any number of replies may follow it."""

    def __init__(self, matcher: Any, signs: dict[str, int], n_words: int, vocabulary: Any) -> None:
        self._matcher = matcher
        self._signs = signs
        self._n_words = n_words
        self._vocabulary = vocabulary

    def tokenize(self, text: bytes) -> list[int]:
        """Return the tokens of a text. Special tokens in it are read as plain text."""
        return list(self._vocabulary.tokenize_bytes(text))

    def matcher(self) -> Matcher:
        """Return a matcher for a new reply."""
        return Matcher(self._matcher.deep_copy(), self._signs, self._n_words)


class Matcher:
    """Follows one reply through its grammar.

    Attributes:
        library: the matcher of llguidance.
        n_words: the number of words in a mask. Each word covers 32 tokens.
        mask: one bit for each token, set if it may come next, (n_words,) int32. None: the mask has not been computed
            yet.
    """

    def __init__(self, library: Any, signs: dict[str, int], n_words: int) -> None:
        self.library = library
        self.n_words = n_words
        self.mask: np.ndarray | None = None
        self._signs = signs

    def copy(self) -> Matcher:
        twin = Matcher(self.library.deep_copy(), self._signs, self.n_words)
        twin.mask = self.mask
        return twin

    def add(self, token_id: int) -> None:
        """Advance by a token that was chosen."""
        self.library.consume_token(token_id)
        self.mask = None

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """Count how many of these tokens could follow, one after the other. The matcher does not change."""
        return int(self.library.validate_tokens(list(token_ids)))

    @property
    def is_accepting(self) -> bool:
        """Return whether the reply may end here."""
        return bool(self.library.is_accepting())

    @property
    def is_stopped(self) -> bool:
        """Return whether the reply cannot go on."""
        return bool(self.library.is_stopped())

    @property
    def is_done(self) -> bool:
        """Return whether the text of the grammar has ended, or can no longer follow it."""
        return self.is_stopped or self.error is not None

    @property
    def error(self) -> str | None:
        """Say why the reply cannot follow the grammar any further. None: it can."""
        return _short(self.library.get_error()) if self.library.is_error() else None

    def closing_ids(self) -> list[int]:
        """Return the tokens that bring the reply nearer to its end.

        These are end tokens, and characters that close a string, an object or a list, or that separate required parts.
        """
        if self.is_accepting:
            return [i for sign, i in self._signs.items() if sign.startswith("end ")]
        if self.mask is None:
            fill_masks([self])
        assert self.mask is not None
        bits = self.mask.view(np.uint8)
        allowed = {sign: i for sign, i in self._signs.items() if bits[i >> 3] >> (i & 7) & 1}
        if "a" in allowed and '"' not in allowed and (found := self._before_the_quote()):
            return found
        is_in_string = "a" in allowed and not allowed.keys().isdisjoint("}]")
        for signs in ('"',) if is_in_string else ("}]", '"', ","):
            if found := [allowed[sign] for sign in signs if sign in allowed]:
                return found
        return []

    def _before_the_quote(self) -> list[int]:
        """Return the tokens after which a string of JSON can be closed, at once or one character later."""
        if (quote := self._signs.get('"')) is None:
            return []
        signs = [self._signs[sign] for sign in _INSIDE if sign in self._signs]
        for n in (1, 2):
            ways = product(signs, repeat=n)
            if found := {way[0] for way in ways if self.count_allowed([*way, quote]) > n}:
                return sorted(found)
        return []


def fill_masks(matchers: Sequence[Matcher], threads: Any = None) -> None:
    """Compute which tokens each reply's grammar allows next. Each matcher keeps its mask.

    Cost: 10 to 100 us for each mask, with up to 150,000 tokens in the vocabulary.

    Args:
        threads: an executor of llguidance, which computes the masks. None: this thread does.
    """
    n_rows, n_words = len(matchers), matchers[0].n_words
    bits = np.zeros((n_rows, n_words), np.int32)
    address, n_bytes = bits.ctypes.data, n_words * 4
    if threads is None:
        for i, matcher in enumerate(matchers):
            matcher.library.unsafe_compute_mask_ptr(address + i * n_bytes, n_bytes)
    else:
        pairs = [(matcher.library, i) for i, matcher in enumerate(matchers)]
        threads.unsafe_compute_mask_ptr(pairs, address, n_bytes, n_rows)
    for matcher, row in zip(matchers, bits, strict=True):
        matcher.mask = row


def json_rule(schema: dict[str, Any]) -> str:
    """Return a part of a Lark rule that stands for JSON by a schema.

    Raises GrammarError if the schema is nested too deeply.
    """
    own = schema.get("x-guidance")
    options = {"whitespace_pattern": WHITESPACE} | (own if isinstance(own, dict) else {})
    try:
        return "%json " + json.dumps(with_exact_dates(schema) | {"x-guidance": options})
    except RecursionError:
        raise GrammarError("the schema is nested too deeply; give its inner parts names, in $defs") from None


def _check_numbers(lark: str) -> None:
    try:
        number = find_in_grammar(lark)
    except RecursionError:
        raise GrammarError("a schema in this grammar is nested too deeply") from None
    if number is not None:
        raise GrammarError(f"the number {number} is too small to be enforced; give one of at least {LEAST}")


def _library() -> Any:
    try:
        return import_module("llguidance")
    except ImportError:
        raise SpecError('grammars need llguidance; pip install "hybridmem[grammar]"') from None


def _short(error: str) -> str:
    """Return an error of llguidance without the part that quotes the generated grammar."""
    said = re.split(r"\n\s*\d+ \||\s<state>", error)[0]
    said = said.replace("NoExtensionBias", "nothing can follow, not even the end")
    said = re.sub(r"Unimplemented keys: \[(.*?)\]", r"these keys cannot be enforced: \1", said)
    return " ".join(re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said).split())[:300]
