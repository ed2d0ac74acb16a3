"""Holds bytes: the arena that divides a budget into blocks, the pools and tables of blocks, and their arrays."""
