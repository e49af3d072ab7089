"""Whole models sleep in pinned host memory and wake in the same tensors."""

from forebay.sleep.sleeper import Sleeper

__all__ = ["Sleeper"]
