"""Finds the bytes for which single tokens stand. A token may be a part of a character."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any

_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """Looks tokens up in a tokenizer's vocabulary. Cost: one look-up, without decoding.

    Args:
        tokenizer: a tokenizer of transformers, either byte-level or from SentencePiece.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, token_id: int) -> bytes:
        name = self._names.get(token_id, "")
        if token_id in self._added:
            return name.encode()
        if self._is_byte_level:
            return b"".join(self._bytes.get(sign) or sign.encode() for sign in name)
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode(errors="replace")

    @cached_property
    def _names(self) -> dict[int, str]:
        return {i: name for name, i in self._tokenizer.get_vocab().items()}

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(getattr(self._tokenizer, "added_tokens_decoder", {}))

    @cached_property
    def _is_byte_level(self) -> bool:
        # This is the visible character that byte-level tokenizers write for a space.
        return "\u0120" in self._tokenizer.get_vocab()

    @cached_property
    def _bytes(self) -> dict[str, bytes]:
        """Return the byte for which each character of byte-level tokenizers stands.

        It is the byte itself, or a sign after the first 256.
        """
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in shown]
        signs = {chr(byte): bytes([byte]) for byte in shown}
        return signs | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(hidden)}
