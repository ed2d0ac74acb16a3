"""Reads the weights that layers take, and defines the formats of weights and how weights are recognized."""
