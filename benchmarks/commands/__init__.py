"""Holds the commands of `python -m benchmarks`, one module for each subject that they measure."""
