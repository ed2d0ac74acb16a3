"""Keeps special tokens that somebody only wrote as text from having an effect, such as the end of a turn.

A tokenizer finds the names of special tokens wherever they stand, in a user's message as in the chat template around
it. Text that contains them could forge a turn. So a name in the text of people, tools and models is cut before the
template gets it, and only names without a cut become special tokens.
"""

from hybridmem.chat.special_tokens.guard import Rendered, protect
from hybridmem.chat.special_tokens.templates import apply_template, find_turn_begin, find_turn_end, template_text
from hybridmem.chat.special_tokens.tokens import SpecialTokens, Tokenizer, special_tokens_of

__all__ = [
    "Rendered",
    "SpecialTokens",
    "Tokenizer",
    "apply_template",
    "find_turn_begin",
    "find_turn_end",
    "protect",
    "special_tokens_of",
    "template_text",
]
