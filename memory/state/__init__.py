"""Keeps bodies and tails: the table of their blocks, and how recurrences read them."""
