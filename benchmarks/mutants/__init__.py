"""Puts small faults into the core, one at a time, and checks that the tests fail (mutation testing)."""
