"""Builds the tokenizer of a GGUF file from the fields of its header.

The ids are those that llama.cpp gives. There are four kinds of vocabularies: byte-level BPE ("gpt2", with a `pre` that
says how texts are cut), BPE over characters ("gemma4"), SentencePiece's BPE by scores ("llama") and RWKV's World
("rwkv").
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.freed_memory import give_back_freed_memory
from hybridmem.models.loading.gguf.file import GgufFile
from hybridmem.models.loading.gguf.kept_tokenizers import kept_tokenizer
from hybridmem.models.loading.gguf.pre_tokenizers import DEFAULT, PRE_TOKENIZERS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""llama.cpp's types of those tokens that are found in a text before it is cut."""

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|eom_id|>",
)  # fmt: skip
"""Names of tokens that end turns, whatever type the file gives them."""

_SPACE = "▁"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}
"""Maps transformers' names of special tokens to those of GGUF, which really spells "separator" as "seperator"."""


def load_gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with its chat template.

    Raises FormatError if there is no tokenizer, or if it is of an unknown kind or contradicts itself.
    """
    model = file.value("tokenizer.ggml.model", is_needed=False)
    if model == "rwkv":
        tokenizer = _load_world(file)
    elif model in _KINDS:
        with _without_collection():
            tokenizer = _load_fast(file, model)
    else:
        known = ", ".join([*_KINDS, "rwkv"])
        raise FormatError(
            f"{file.path} has no tokenizer that can be read: its kind is {model!r}, and those of {known} are "
            "known; put tokenizer.json into a folder and load the tokenizer from there"
        )
    # A file may have several templates: a request with tools uses "tool_use", for example.
    if named := file.values_below("tokenizer.chat_template."):
        tokenizer.chat_template = {"default": tokenizer.chat_template, **named}
    ends = [file.value(f"tokenizer.ggml.{name}_token_id", is_needed=False) for name in ("eot", "eom")]
    tokenizer.end_token_ids = [int(i) for i in ends if i is not None]
    give_back_freed_memory()
    return tokenizer


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause Python's garbage collector, which would look at half a million new pairs of strings again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_living: WeakValueDictionary[str, PreTrainedTokenizerBase] = WeakValueDictionary()
"""Maps the digest of a header to the tokenizer that was made of it last, as long as somebody uses that."""


def _load_fast(file: GgufFile, model: str) -> PreTrainedTokenizerBase:
    """Make a tokenizer. Those of one header share their vocabulary and merges, which take most of the memory.

    Nothing of transformers changes these. Everything else is each tokenizer's own: added tokens, templates, truncation,
    and what is done to texts.
    """
    from transformers import PreTrainedTokenizerFast

    alike = _living.get(digest := file.header_digest())
    if alike is not None:
        backend = _build(file, model, alike.backend_tokenizer.model)
    else:
        backend = kept_tokenizer(file, partial(_build, file, model))
    roles = _roles(file, model, backend.get_vocab_size())
    _living[digest] = tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        chat_template=file.value("tokenizer.chat_template", is_needed=False),
        clean_up_tokenization_spaces=False,
        **{f"{role}_token": backend.id_to_token(i) for role, i in roles.items()},
    )
    return tokenizer


def _roles(file: GgufFile, model: str, n_tokens: int) -> dict[str, int]:
    """Return the ids of special tokens by transformers' names of them."""
    usual = {"bos": 1, "eos": 2, "unk": 0} if model == "llama" else {}
    ids = {role: _id_of(file, name, n_tokens, usual.get(role)) for role, name in _ROLES.items()}
    return {role: i for role, i in ids.items() if i is not None}


def _build(file: GgufFile, model: str, shared: models.BPE | None = None) -> Tokenizer:
    """Build a tokenizer, with a vocabulary and merges that were made before if there are any."""
    tokens = _tokens_of(file)

    def make(make_anew: Callable[[], models.BPE]) -> Tokenizer:
        return Tokenizer(make_anew() if shared is None else shared)

    adds_bos, backend = _KINDS[model](file, tokens, make)
    added = _added_tokens(file, tokens)
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    if backend.get_vocab_size() != len(tokens):
        raise FormatError(
            f"{file.path} has {len(tokens):,} tokens that make {backend.get_vocab_size():,}; get it again"
        )
    names = {role: tokens[i] for role, i in _roles(file, model, len(tokens)).items()}
    # llama.cpp adds it for Gemma 4 whatever the file says, because files say it wrongly.
    bos = "bos" in names and (bool(file.value("tokenizer.ggml.add_bos_token", adds_bos)) or model == "gemma4")
    eos = "eos" in names and bool(file.value("tokenizer.ggml.add_eos_token", False))
    around = [*([names["bos"]] if bos else []), "$A", *([names["eos"]] if eos else [])]
    if len(around) > 1:
        special = [(name, tokens.index(name)) for name in around if name != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=around, pair=None, special_tokens=special)
    return backend


class _Given:
    """Gives a tokenizer to transformers without a copy, which would take seconds for a large vocabulary."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, _: Any) -> Tokenizer:
        return self._backend


def _tokens_of(file: GgufFile) -> list[str]:
    """Return the tokens by their ids. Raises FormatError if two tokens are spelled alike."""
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(file.value("tokenizer.ggml.tokens"))]
    if len(set(tokens)) < len(tokens):
        ((twice, _),) = Counter(tokens).most_common(1)
        raise FormatError(f"{file.path} has several tokens {twice!r}; convert the model again")
    return tokens


def _id_of(file: GgufFile, name: str, n_tokens: int, usual: int | None = None) -> int | None:
    """Return the id of a special token, if the file names one that exists; else the usual one."""
    found = file.value(f"tokenizer.ggml.{name}_token_id", is_needed=False)
    return int(found) if found is not None and 0 <= int(found) < n_tokens else usual


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is cut: special tokens and user-defined ones."""
    kinds = file.value("tokenizer.ggml.token_type", is_needed=False) or [1] * len(tokens)
    ends = set(_ENDS)
    is_phi_3 = any(name in str(file.value("general.name", "")).lower() for name in ("phi-3", "phi3"))
    found = []
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or token in ends:
            # Phi-3 was trained without the white space that its template writes after these.
            strips = is_phi_3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            is_special = kind != _USER_DEFINED or token in ends
            found.append(AddedToken(token, special=is_special, normalized=False, rstrip=strips))
    return found


_Make = Callable[[Callable[[], models.BPE]], Tokenizer]
"""Makes a tokenizer, given a function that makes its vocabulary and merges if nobody has made them."""


def _bytes_bpe(file: GgufFile, tokens: list[str], make: _Make) -> tuple[bool, Tokenizer]:
    """Build byte-level BPE, which GPT-2 and most other models use."""
    name = file.value("tokenizer.ggml.pre", is_needed=False)
    if name is not None and name not in PRE_TOKENIZERS:
        raise FormatError(
            f"{file.path} cuts texts as {name!r} (tokenizer.ggml.pre), which is not known; put tokenizer.json into a "
            "folder and load the tokenizer from there"
        )
    own = DEFAULT if name is None else PRE_TOKENIZERS[name]
    backend = make(partial(_bpe, file, tokens, ignore_merges=own.ignores_merges))
    cuts = [pre_tokenizers.Split(Regex(each), "isolated") for each in own.expressions]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return own.adds_bos, backend


def _characters_bpe(file: GgufFile, tokens: list[str], make: _Make) -> tuple[bool, Tokenizer]:
    """Build BPE over characters with a mark for spaces, which Gemma 4 uses. A text is cut only at line ends."""
    unknown = _unknown(file, tokens)
    backend = make(partial(_bpe, file, tokens, byte_fallback=True, unk_token=unknown, ignore_merges=False))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    backend.decoder = _space_decoder(strips=False)
    return True, backend


def _bpe(file: GgufFile, tokens: list[str], **options: Any) -> models.BPE:
    merges = [_pair(merge) for merge in file.value("tokenizer.ggml.merges")]
    return models.BPE(dict(zip(tokens, count(), strict=False)), merges, **options)


def _pair(merge: str) -> tuple[str, str]:
    """Return the two parts of a merge, which a space divides. The first part may itself begin with a space."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _sentence_piece(file: GgufFile, tokens: list[str], make: _Make) -> tuple[bool, Tokenizer]:
    backend = make(partial(_bpe_by_scores, file, tokens))
    adds_space = bool(file.value("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    backend.decoder = _space_decoder(strips=adds_space)
    return True, backend


def _bpe_by_scores(file: GgufFile, tokens: list[str]) -> models.BPE:
    """Return SentencePiece's BPE: of all neighbours that form a token, those with the best-scored token merge first."""
    scores, ids = file.value("tokenizer.ggml.scores"), dict(zip(tokens, count(), strict=False))
    if len(scores) < len(tokens):
        raise FormatError(f"{file.path} has {len(scores):,} scores for {len(tokens):,} tokens; convert the model again")
    order = sorted(range(len(tokens)), key=lambda i: -scores[i])
    merges = [
        (token[:at], token[at:])
        for token in map(tokens.__getitem__, order)
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token=_unknown(file, tokens))


def _unknown(file: GgufFile, tokens: list[str]) -> str:
    return tokens[_id_of(file, "unknown", len(tokens), 0) or 0]


def _space_decoder(*, strips: bool) -> Any:
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if strips else [])])


_KINDS = {"gpt2": _bytes_bpe, "gemma4": _characters_bpe, "llama": _sentence_piece}
"""Maps `tokenizer.ggml.model` to a function that builds the tokenizer, and says whether texts begin with BOS."""


def _load_world(file: GgufFile) -> PreTrainedTokenizerBase:
    from hybridmem.models.loading.gguf.world import WorldTokenizer

    template = file.value("tokenizer.chat_template", is_needed=False)
    return WorldTokenizer(
        file.value("tokenizer.ggml.tokens"),
        file.value("tokenizer.ggml.token_type"),
        int(file.value("tokenizer.ggml.eos_token_id", 0)),
        # A template without "{" is only a name that llama.cpp knows.
        chat_template=template if template and "{" in template else None,
    )
