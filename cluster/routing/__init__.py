"""Chooses a replica for a prompt; knows nothing of Ray."""
