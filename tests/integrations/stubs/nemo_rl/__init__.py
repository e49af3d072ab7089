"""NeMo-RL's contract, as far as forebay relies on it."""
