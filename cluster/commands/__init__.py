"""Implements what the command line calls."""
