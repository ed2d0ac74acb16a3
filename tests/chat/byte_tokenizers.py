"""Makes tokenizers of bytes with marks of their own, for chat templates of any family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def make_byte_tokenizer(template: str, special: Sequence[str] = (), added: Sequence[str] = ()) -> Any:
    """Return a tokenizer with a token for each byte, then special tokens, then other added ones. "<eos>" ends texts."""
    vocabulary = {sign: i for i, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<eos>", *special)])
    backend.add_tokens([AddedToken(name, special=False, normalized=False) for name in added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", bos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer
