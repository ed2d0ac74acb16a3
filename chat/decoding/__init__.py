"""Generates replies with drafts (speculative decoding) and by beam search."""
