"""Moves sequences out of the budget and back: into host memory, swap files and saved files."""
