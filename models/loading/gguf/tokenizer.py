"""Makes a tokenizer from a GGUF file, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from memory.errors import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a model, with its chat template.

    Raises FormatError if there is none, or transformers cannot read its kind.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    try:
        architecture, tokens, config = get_gguf_tokenizer(str(path))
        backend, more = convert_gguf_tokenizer(architecture, tokens)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **config, **more)
    except Exception as error:  # it indexes into whatever the file says
        raise FormatError(
            f"{path} has no tokenizer that can be read ({type(error).__name__}: {error}); load one from a folder"
        ) from error
