"""Stands for AReaL, which asks for another torch: only what forebay uses of it."""
