"""The logger ``forebay``: what was begun, what it took, what was decided. Nothing is printed unless a program asks."""

from __future__ import annotations

import logging

logger = logging.getLogger("forebay")
# Without a handler of the program, Python would print warnings to standard error.
logger.addHandler(logging.NullHandler())
