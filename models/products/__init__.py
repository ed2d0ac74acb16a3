"""Multiplies rows by weights on the CPU."""
