"""A budget of memory decides what is kept, offloaded and recomputed."""
