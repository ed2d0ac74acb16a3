"""Choosing tokens: sampling, speculative drafts, beam search."""
