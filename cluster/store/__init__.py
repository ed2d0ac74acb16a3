"""Keeps the sequences of all replicas, and leases on sessions, in one place that fsspec can reach."""
