"""Simulated operation of the engine: time, arrivals and failures follow from one seed."""
