"""Holds chat sessions, with their turns, edits, branches and saved files, and templates with holes to fill."""

from hybridmem.chat.session.session import ChatSession

__all__ = ["ChatSession"]
