"""Keeps conversations in one SQLite database, as trees of messages with the token ids that were fed to the model."""

from hybridmem.chat.stored.nodes import Node, StoredSession
from hybridmem.chat.stored.store import SessionStore

__all__ = ["Node", "SessionStore", "StoredSession"]
