"""Keeps sequences of all replicas in one place that fsspec knows, and leases on sessions."""
