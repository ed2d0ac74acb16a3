"""Contains what replies hold beside text: calls of tools, thoughts, and the grammars of structured output."""
