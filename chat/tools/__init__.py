"""Reads calls of tools and thoughts in replies, and makes the grammars of structured output."""
