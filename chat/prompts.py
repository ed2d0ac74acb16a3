"""From messages to token ids: the tokenizer of a checkpoint, and a chat's new part encoded on its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from memory import FormatError
from models import LanguageModel
from models.loading import find_folder

Tokenizer = Any
"""A tokenizer of transformers; its classes have no common type that mypy could use."""
Message = dict[str, str]


def load_tokenizer(path_or_hub_id: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint, which is named as `load_model` takes it. Raises FormatError if it is missing or damaged."""
    folder = find_folder(path_or_hub_id)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(f"{folder} has no tokenizer that can be read ({reason}); put tokenizer.json beside config.json") from error


def find_stop_ids(tokenizer: Tokenizer, model: LanguageModel) -> tuple[int, ...]:
    """The tokens that end a reply: the tokenizer's own end first, then what config.json adds. Empty if nothing names one."""
    configured = getattr(model.config, "eos_token_id", None)
    ids = [tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def encode_prompt(tokenizer: Tokenizer, text: str, *, is_chat: bool | None) -> list[int]:
    """Token ids of a user's first message, or of plain text.

    Args:
        is_chat: None uses the chat template if the tokenizer has one.
    Raises:
        FormatError: a chat was asked for and there is no template.
    """
    if is_chat and not tokenizer.chat_template:
        raise FormatError("this tokenizer has no chat template; use --raw")
    if is_chat or (is_chat is None and tokenizer.chat_template):
        return encode_turn(tokenizer, [], text)
    return list(tokenizer.encode(text))


def encode_turn(tokenizer: Tokenizer, history: list[Message], text: str) -> list[int]:
    """Token ids of what a new user message adds to a chat that a memory already holds.

    The memory has seen everything up to and with the end token of the last reply; whatever the template puts behind it
    belongs to the new part.

    Raises:
        FormatError: the template rewrites earlier turns, so that no new part follows from the old one.
    """
    rendered = render(tokenizer, [*history, {"role": "user", "content": text}])
    seen = render(tokenizer, history[:-1]) + history[-1]["content"] + tokenizer.eos_token if history else ""
    if not rendered.startswith(seen):
        raise FormatError("this chat template rewrites earlier turns; its new turns cannot be fed to what is remembered")
    return list(tokenizer.encode(rendered[len(seen) :], add_special_tokens=False))


def encode_chat(tokenizer: Tokenizer, messages: list[Message]) -> list[int]:
    """Token ids of a whole chat, up to where the reply begins. Raises FormatError: no chat template, or it refuses the messages."""
    return list(tokenizer.encode(render(tokenizer, messages), add_special_tokens=False))


def render(tokenizer: Tokenizer, messages: list[Message], *, awaits_reply: bool = True) -> str:
    """The chat template's text of these messages, with the opening of a reply behind them unless told otherwise.

    Raises:
        FormatError: there is no template, or it refuses the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise FormatError("this tokenizer has no chat template; set tokenizer.chat_template to the one that the model was trained with")
    try:
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=awaits_reply, tokenize=False))
    except (TemplateError, TypeError, ValueError) as error:
        raise FormatError(f"this chat template refuses the messages: {error}") from error
