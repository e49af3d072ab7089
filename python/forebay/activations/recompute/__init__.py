"""Layers that run again in the backward pass."""
