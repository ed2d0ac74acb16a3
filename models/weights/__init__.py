"""Reads the weights that layers take, and says in which format they are wanted and by what they are recognised."""
