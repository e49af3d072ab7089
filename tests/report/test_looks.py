"""Light, dark, narrow and on paper."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pypdf
import pytest
from looking import CONTRAST, colours, picture, visible

if TYPE_CHECKING:
    from pathlib import Path

    from browser import Browser


def test_light_and_dark_differ_and_both_are_readable(browser: Browser, plain: Path) -> None:
    pages, pictures = [], []
    for dark in (False, True):
        browser.open(plain, dark=dark)
        found = browser.evaluate(CONTRAST)
        assert len(found["texts"]) > 200
        assert [text for text in found["texts"] if text[0] < 4.5] == []
        assert len(found["shapes"]) >= 18
        assert [shape for shape in found["shapes"] if shape[0] < 3] == []
        pages.append(found["page"])
        pictures.append(picture(browser))
    assert sum(pages[0]) > 3 * 200
    assert sum(pages[1]) < 3 * 60
    assert pictures[0] != pictures[1]
    browser.dark(False)
    browser.settle()
    assert picture(browser) == pictures[0], "it follows the system while it is open"


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_no_width_scrolls_the_page_sideways(browser: Browser, merged: Path, width: int) -> None:
    browser.open(merged, width=width, height=740)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wide = browser.evaluate(
        "[...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll, pre, .skip') && "
        f"one.getBoundingClientRect().right > {width} + 0.5).map(one => one.outerHTML.slice(0, 80))"
    )
    assert wide == []
    assert {"--c-fetch", "--c-store"} <= colours(browser, "rows")


@pytest.mark.parametrize("dark", [False, True])
def test_it_prints_all_of_it_on_white(browser: Browser, plain: Path, dark: bool) -> None:
    browser.open(plain, dark=dark)
    browser.evaluate("document.querySelectorAll('details').forEach(one => { one.open = false; })")
    browser.evaluate("document.querySelector('[data-do=in]').click()")
    browser.settle()
    before, shown = visible(browser), picture(browser)
    browser.evaluate(
        "window.addEventListener('beforeprint', () => { window.range = {...document.getElementById('range').dataset};"
        " window.paper = getComputedStyle(document.documentElement).getPropertyValue('--page'); })"
    )
    pdf = pypdf.PdfReader(io.BytesIO(browser.pdf()))
    assert 2 <= len(pdf.pages) <= 12
    text = "\n".join(page.extract_text() for page in pdf.pages)
    for part in (
        "forebay report: run.json",
        "overlap_step would hide",
        "Waits of each step",
        "Layer by layer",
        "chunk_bytes",
    ):
        assert part in text, part
    assert "Model, explained" in text
    assert "240.0 ms a pass" in text, "a closed part is open on paper"
    # Some versions print charts as drawings with text, others as images.
    assert "max 50.3 GB/s" in text or sum(len(page.images) for page in pdf.pages) >= 3, "the charts are on paper"
    assert browser.evaluate("window.paper.trim()") == "#ffffff"
    assert float(browser.evaluate("window.range.to")) > before[1], "paper shows the whole time"
    browser.settle()
    assert visible(browser) == before
    assert picture(browser) == shown, "after printing all is as before"
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 0
