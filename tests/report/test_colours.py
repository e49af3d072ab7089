"""Colours that share a row stay apart for eyes that lack one kind of cone."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from browser import Browser
    from numpy.typing import NDArray

    Colour = NDArray[np.float64]

# What an eye sees of linear RGB, by Machado, Oliveira and Fernandes, 2009, with one kind of cone missing.
EYES = {
    "all cones": np.eye(3),
    "no long": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no middle": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    ),
    "no short": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]]
    ),
}
SHARED = [("c-forward", "c-backward", "c-step"), ("c-sleep", "c-wake"), ("s-0", "s-1")]
"""Colours of one row, and of the lines of one chart of two; more lines differ in their dashes too."""
LEAST = 12.0
"""In CIELAB; 2.3 is just noticeable."""


def seen(text: str, eye: NDArray[np.float64]) -> Colour:
    """Return a colour as an eye sees it, in CIELAB."""
    values = np.array([int(text[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    linear = np.clip(eye @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratio = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("eye", EYES)
def test_colours_of_a_row_stay_apart(browser: Browser, plain: Path, eye: str, dark: bool) -> None:
    browser.open(plain, dark=dark)
    for names in SHARED:
        values = {
            name: browser.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
            for name in names
        }
        for one, other in itertools.combinations(names, 2):
            distance = float(np.linalg.norm(seen(values[one], EYES[eye]) - seen(values[other], EYES[eye])))
            assert distance > LEAST, f"{one} and {other} are {distance:.1f} apart"
