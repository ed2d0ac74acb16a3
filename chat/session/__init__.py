"""Holds chat sessions: turns, edits, branches, saved sessions, templates."""

from chat.session.session import ChatSession

__all__ = ["ChatSession"]
