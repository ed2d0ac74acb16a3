"""Keeps the sequences of all replicas, and leases on sessions, in one storage place that fsspec can reach."""
