"""Records the requests of agents as trees of stored sessions (`hybrid-memory serve --trees`)."""
