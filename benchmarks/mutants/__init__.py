"""Mutation testing: small faults are put into the core, one at a time, and the tests must fail."""
