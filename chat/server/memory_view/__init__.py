"""Shows the memory of a running engine to clients: one snapshot, or a stream of them."""
