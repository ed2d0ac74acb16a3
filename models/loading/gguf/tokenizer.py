"""Makes a tokenizer from a GGUF file, by transformers where it knows the kind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybridmem.memory.errors import FormatError
from hybridmem.models.loading.gguf.file import GgufFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, with its chat template.

    Raises FormatError if there is none, or it cannot be read.
    """
    file = GgufFile(path)
    try:
        if file.value("tokenizer.ggml.model", is_needed=False) == "rwkv":
            return _load_world(file)
        tokenizer = _load_known(path)
        if named := file.values_below(
            "tokenizer.chat_template."
        ):  # A request with tools takes "tool_use", for example.
            tokenizer.chat_template = {"default": tokenizer.chat_template, **named}
        ends = [file.value(f"tokenizer.ggml.{name}_token_id", is_needed=False) for name in ("eot", "eom")]
        tokenizer.end_token_ids = [int(i) for i in ends if i is not None]
        return tokenizer
    except FormatError:
        raise
    except Exception as error:  # it indexes into whatever the file says
        raise FormatError(
            f"{path} has no tokenizer that can be read ({type(error).__name__}: {error}); load one from a folder"
        ) from error


def _load_known(path: Path) -> PreTrainedTokenizerBase:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, tokens, config = get_gguf_tokenizer(str(path))
    backend, more = convert_gguf_tokenizer(architecture, tokens)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **config, **more)


def _load_world(file: GgufFile) -> PreTrainedTokenizerBase:
    from hybridmem.models.loading.gguf.world import WorldTokenizer

    template = file.value("tokenizer.chat_template", is_needed=False)
    return WorldTokenizer(
        file.value("tokenizer.ggml.tokens"),
        file.value("tokenizer.ggml.token_type"),
        int(file.value("tokenizer.ggml.eos_token_id", 0)),
        chat_template=template if template and "{" in template else None,  # else a name that llama.cpp knows
    )
