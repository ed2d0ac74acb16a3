"""Simulates users: workloads, recorded dialogues, reports."""
