"""Stands for xtuner, which is not on the registry: only what forebay uses of it."""
