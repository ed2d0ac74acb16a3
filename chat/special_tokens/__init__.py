"""Keeps the names of special tokens in texts from having an effect, such as ending a turn.

A tokenizer finds the names of special tokens wherever they stand, in a user's message as in the chat template around
it. Text that contains them could forge a turn. So names in the text of people, tools and models are cut before the
template gets the text. Only uncut names in the rendered text become special tokens.
"""

from hybridmem.chat.special_tokens.guard import Rendered, protect
from hybridmem.chat.special_tokens.templates import apply_template, find_turn_begin, find_turn_end, template_text
from hybridmem.chat.special_tokens.tokens import SpecialTokens, Tokenizer, special_tokens_of
from hybridmem.chat.special_tokens.wrapped import PromptContext, WrappedTokenizer, bare_of, context_of

__all__ = [
    "PromptContext",
    "Rendered",
    "SpecialTokens",
    "Tokenizer",
    "WrappedTokenizer",
    "apply_template",
    "bare_of",
    "context_of",
    "find_turn_begin",
    "find_turn_end",
    "protect",
    "special_tokens_of",
    "template_text",
]
