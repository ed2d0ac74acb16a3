"""Chooses a replica for each prompt. It does not depend on Ray."""
