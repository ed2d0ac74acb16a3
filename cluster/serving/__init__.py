"""Runs replicas, and the gateways in front of them, as an application of Ray Serve."""
