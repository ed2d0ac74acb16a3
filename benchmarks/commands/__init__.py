"""Holds the commands of `python -m benchmarks`, by what they measure."""
