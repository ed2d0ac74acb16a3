"""Chooses tokens by sampling, by verifying drafts (speculative decoding), and by beam search."""
