"""Groups of processes: the registry of cases, the ranks that run them, and what the cases share."""
