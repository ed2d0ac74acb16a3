"""Chooses tokens.

It holds samplers, the grammars that mask tokens, log probabilities, and guesses of the next tokens.
"""
