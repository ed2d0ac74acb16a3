"""Implements the tokenizer of RWKV's "world" models, which transformers lacks. It always takes the longest token.

Source: https://github.com/BlinkDL/ChatRWKV/tree/main/tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AddedToken, PreTrainedTokenizer

from hybridmem.memory.errors import FormatError

SPECIAL = 3
"""llama.cpp's type of tokens to which no text is encoded."""


class WorldTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Encodes UTF-8 greedily: at each byte it takes the longest token with which the remaining text begins.

    Args:
        tokens: the tokens in the file's spelling: bytes outside of printable ASCII are escaped as in Python. A token's
            id is its index.
        kinds: llama.cpp's type of each token.
        end: the id of the token that ends texts.

    Raises:
        FormatError: a single byte has no token, so some texts could not be encoded.
    """

    def __init__(self, tokens: Sequence[str], kinds: Sequence[int], end: int, **options: Any) -> None:
        special = {i: AddedToken(tokens[i], special=True) for i, kind in enumerate(kinds) if kind == SPECIAL}
        names = {token.content for token in special.values()}
        # Text that reads like a special token is spelled by its bytes, so that text and special token have different
        # ids.
        self._spelled = [
            "".join(f"\\x{byte:02x}" for byte in _unescaped(token)) if token in names and i not in special else token
            for i, token in enumerate(tokens)
        ]
        self._ids = {_unescaped(tokens[i]): i for i in reversed(range(len(tokens))) if i not in special}
        missing = [byte for byte in range(256) if bytes([byte]) not in self._ids]
        if missing:
            raise FormatError(f"this vocabulary has no token for the byte {missing[0]:#04x}; convert the model again")
        lengths: dict[bytes, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[:2], set()).add(len(token))
        self._lengths = {start: sorted(found, reverse=True) for start, found in lengths.items()}
        super().__init__(bos_token=tokens[end], eos_token=tokens[end], added_tokens_decoder=special, **options)

    @property
    def vocab_size(self) -> int:
        return len(self._spelled)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of tokens, in the file's spelling."""
        return {token: i for i, token in reversed(list(enumerate(self._spelled)))}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        data, found, at = text.encode(errors="surrogatepass"), [], 0
        while at < len(data):
            lengths = self._lengths.get(data[at : at + 2], [1])
            length = next((n for n in lengths if data[at : at + n] in self._ids), 1)
            found.append(self._spelled[self._ids[data[at : at + length]]])
            at += length
        return found

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[_unescaped(token)]

    def _convert_id_to_token(self, index: int) -> str:
        return self._spelled[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        data = b"".join(map(_unescaped, tokens))
        return data.decode(errors="replace")

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: Any = None) -> list[int]:
        """Return the ids themselves, because these models get no special token before a text."""
        return token_ids_0 + (token_ids_1 or [])


def _unescaped(token: str) -> bytes:
    return token.encode().decode("unicode_escape").encode("latin-1")
