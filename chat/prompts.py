"""Turns messages into token ids. It loads a checkpoint's tokenizer, and encodes whole chats or only their new parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from hybridmem.chat.special_tokens import Rendered, apply_template, bare_of, context_of, find_turn_end, protect
from hybridmem.chat.special_tokens import Tokenizer as Tokenizer
from hybridmem.memory import FormatError
from hybridmem.models import LanguageModel
from hybridmem.models.loading.folders import find_folder
from hybridmem.models.loading.generation_config import read_generation_config
from hybridmem.models.loading.gguf import GgufFile, is_gguf, load_gguf_tokenizer

_OF_TEMPLATES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
"""The errors that a template may raise, since it is a program from the checkpoint. Bounded tokenizers raise other
errors, which are passed on.
"""

Message = dict[str, Any]
Span = tuple[int, int]
"""The characters [start, end) of a rendered text."""


def load_tokenizer(path_or_hub_id: str | Path | GgufFile) -> Tokenizer:
    """Load the tokenizer of a checkpoint, named as for `load_model`, or of an open GGUF file.

    The tokenizer does what tokenizer.json says, whatever class a config names. Some tokenizer classes of transformers
    replace the file's pre-tokenizer by another one, which would split texts into other tokens than the model has
    learned.

    Raises FormatError if the file is missing or damaged.
    """
    if isinstance(path_or_hub_id, GgufFile):
        return load_gguf_tokenizer(path_or_hub_id)
    folder = find_folder(path_or_hub_id)
    if is_gguf(folder):
        return load_gguf_tokenizer(GgufFile(folder))
    try:
        of_class: Any = PreTrainedTokenizerFast
        if not (folder / "tokenizer.json").exists():
            # It is imported only here, because it brings the names of all models, which takes a tenth of a second.
            from transformers import AutoTokenizer

            of_class = AutoTokenizer
        tokenizer: Tokenizer = of_class.from_pretrained(folder, local_files_only=True)
        tokenizer.encode("a")  # Some nonsensical options are found only at this first use.
        return tokenizer
    except BaseException as error:
        # For a damaged file, the tokenizers library raises a bare Exception, or panics, which is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise FormatError(
            f"{folder} has no tokenizer that can be read ({reason}); put tokenizer.json beside config.json"
        ) from error


def find_stop_ids(tokenizer: Tokenizer, model: LanguageModel) -> tuple[int, ...]:
    """Return the tokens that end a reply, the tokenizer's end token first; empty if nothing names one.

    They are named by the tokenizer, config.json, generation_config.json, the fields of a GGUF file, and by the chat
    template, which writes one after a reply.

    Raises FormatError: generation_config.json cannot be read.
    """
    named = [
        tokenizer.eos_token_id, getattr(model.config, "eos_token_id", None),
        read_generation_config(tokenizer).get("eos_token_id"), getattr(tokenizer, "end_token_ids", None),
        find_turn_end(tokenizer),
    ]  # fmt: skip
    ids = [i for each in named for i in (each if isinstance(each, list | tuple) else [each])]
    n_tokens = model.memory_spec.vocab_size
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < n_tokens))


def encode_prompt(tokenizer: Tokenizer, text: str, *, is_chat: bool | None) -> list[int]:
    """Return the token ids of a user's first message, or of plain text.

    Args:
        is_chat: whether to use the chat template. None: use it if the tokenizer has one. Plain text is the whole
            prompt, and may contain special tokens.
    Raises:
        FormatError: a chat was asked for and there is no template.
    """
    if is_chat and not tokenizer.chat_template:
        raise FormatError("this model has no chat template, so it only continues texts; use --raw")
    if is_chat or (is_chat is None and tokenizer.chat_template):
        return encode_turn(tokenizer, [], text)
    return list(tokenizer.encode(text))


def encode_turn(tokenizer: Tokenizer, history: list[Message], text: str) -> list[int]:
    """Return the token ids that a new user message adds to a chat that a memory already holds.

    The memory has seen everything up to the end token of the last reply, including that token. Whatever the template
    puts after it belongs to the new part. Special tokens in the message are plain text.

    Raises:
        FormatError: the template rewrites earlier turns, so the new text does not begin with the old one.
    """
    messages = [*history, {"role": "user", "content": text}]
    rendered = render_guarded(tokenizer, messages)
    seen = render(tokenizer, history[:-1]) + history[-1]["content"] + tokenizer.eos_token if history else ""
    if not rendered.text.startswith(seen):
        raise FormatError(
            "this chat template rewrites earlier turns; its new turns cannot be fed to what is remembered"
        )
    return rendered.encode(tokenizer, len(seen))


def encode_chat(tokenizer: Tokenizer, messages: list[Message], *, parse_special: bool = False) -> list[int]:
    """Return the token ids of a whole chat, up to the beginning of the reply.

    Args:
        parse_special: special tokens may be written in messages. Otherwise their names in messages are plain text.
    Raises:
        FormatError: there is no chat template, or it refuses the messages, or the tokenizer cannot write a special
            token's name as text.
    """
    return render_guarded(tokenizer, messages, parse_special=parse_special).encode(tokenizer)


def locate(
    tokenizer: Tokenizer, text: str, messages: list[Message], *, awaits_reply: bool
) -> tuple[list[Span | None], str, set[int]]:
    """Find the place of each message's content in the rendered text.

    None: the template left it out, or its place is uncertain.

    Also return the text with placeholders instead of contents, and the messages whose placeholders occur in that text.

    A plain search for the content "a" would find it in "<|assistant|>". So the template also renders placeholders,
    which occur nowhere else. The text around the placeholders is then searched for in the real text.
    """
    placeholders = [uuid4().hex for _ in messages]
    dressed = [{**message, "content": placeholder} for message, placeholder in zip(messages, placeholders, strict=True)]
    whole = rest = render(tokenizer, dressed, awaits_reply=awaits_reply)
    # Some templates render only the last messages.
    shown = [i for i, placeholder in enumerate(placeholders) if placeholder in rest]
    spans: list[Span | None] = [None] * len(messages)
    at = 0
    for i, following in zip(shown, [*shown[1:], None], strict=False):
        before, _, rest = rest.partition(placeholders[i])
        after = rest if following is None else rest.partition(placeholders[following])[0]
        # A template may write other text around the real contents than around placeholders. From there on, no place is
        # certain.
        if not text.startswith(before, at):
            break
        start = at + len(before)
        ends = (
            start + len(words) for words in _stripped(messages[i]["content"]) if text.startswith(words + after, start)
        )
        # Either the content stands here word for word, or the template changed it.
        at = next(ends, text.find(after, start))
        if at < 0:
            break
        spans[i] = start, at
    return spans, whole, set(shown)


def _stripped(content: str) -> tuple[str, ...]:
    """Return the forms of a content that templates may write: with white space stripped or not."""
    return content, content.strip(), content.lstrip(), content.rstrip()


def render(tokenizer: Tokenizer, messages: list[Message], *, awaits_reply: bool = True) -> str:
    """Render messages by the chat template. The opening of a reply follows them unless `awaits_reply` is false.

    Raises:
        FormatError: there is no template, or it refuses the messages.
    """
    return render_guarded(tokenizer, messages, awaits_reply=awaits_reply, parse_special=True).text


def render_guarded(
    tokenizer: Tokenizer, messages: list[Message], *, awaits_reply: bool = True, parse_special: bool = False
) -> Rendered:
    """Render messages as `render` does, and record where the names of special tokens are only text.

    Args:
        parse_special: whether messages may contain special tokens.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise FormatError(
            "this model has no chat template, so it only continues texts, with generate --raw or /v1/completions; to "
            "chat, set tokenizer.chat_template to the one that the model was trained with"
        )
    context = context_of(tokenizer)
    options = dict(context.template_options)
    read: Callable[[str], Rendered] = Rendered
    if not parse_special:
        messages, options, read = protect(tokenizer, messages, options)
    if context.write_calls is not None:
        messages = [context.write_calls(message) for message in messages]
    try:
        text = apply_template(bare_of(tokenizer), messages, add_generation_prompt=awaits_reply, **options)
    except _OF_TEMPLATES as error:
        raise FormatError(f"this chat template refuses the messages: {str(error).rstrip('.')}") from error
    if context.check_text is not None:
        context.check_text(text)
    return read(text)
