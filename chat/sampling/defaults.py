"""Reads the sampling that a checkpoint's authors recommend."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import BatchError, FormatError
from hybridmem.models.loading.generation_config import read_generation_config

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "exponential_decay_length_penalty": "length_decay",
}
"""The name of an option in generation_config.json -> its name in `Sampling`."""


def read_defaults(tokenizer: Any, temperature: float = 1.0) -> Sampling:
    """Return the sampling in generation_config.json, from the folder of a tokenizer.

    Args:
        temperature: the temperature if the file does not name one.
    Raises:
        FormatError: the file holds an impossible value.
    """
    named = read_generation_config(tokenizer)
    try:
        found = {_NAMES[name]: value for name, value in named.items() if name in _NAMES and value is not None}
        if found.get("top_k") == 0:  # In transformers, a top_k of 0 means all tokens.
            del found["top_k"]
        return Sampling(**({"temperature": temperature} | found))
    except (ValueError, TypeError, BatchError) as error:
        raise FormatError(f"generation_config.json of {tokenizer.name_or_path} cannot be read: {error}") from None
