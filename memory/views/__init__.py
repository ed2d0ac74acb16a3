"""Shows what a memory holds: counters, bytes by pool and by sequence, and tables."""
