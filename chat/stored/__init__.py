"""Keeps conversations as trees of messages, with the token ids that the model was fed, in one SQLite database."""

from hybridmem.chat.stored.nodes import Node, StoredSession
from hybridmem.chat.stored.store import SessionStore

__all__ = ["Node", "SessionStore", "StoredSession"]
