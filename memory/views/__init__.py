"""What can be seen of a memory: counters, usage by kind and by sequence, and tables."""
