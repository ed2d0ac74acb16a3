"""Bytes: how the budget is cut into blocks, and the arrays that say where they are. Knows no layer."""
