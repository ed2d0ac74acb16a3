"""Simulated users: workloads, recorded dialogues, reports."""
