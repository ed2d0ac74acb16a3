"""Runs replicas and the gateway before them as an application of Ray Serve."""
