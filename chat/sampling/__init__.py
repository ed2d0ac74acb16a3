"""Chooses tokens: samplers, grammars that mask them, their log probabilities, and guesses of the tokens to come."""
