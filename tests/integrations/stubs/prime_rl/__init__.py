"""Stands for prime-rl, which is not on the registry: only what forebay uses of it."""
