"""Holds chat sessions: turns, edits, branches, saved sessions, templates."""

from hybridmem.chat.session.session import ChatSession

__all__ = ["ChatSession"]
