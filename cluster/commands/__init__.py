"""Implements the commands for fleets, which the command line calls."""
