"""Simulates fleets of replicas with the router's own code."""
