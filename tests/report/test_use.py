"""Zoom, movement and details, with buttons, mouse, wheel, keys and fingers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import traces
from looking import LEFT, picture, rows_box, visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from browser import Browser


def test_buttons_zoom_and_move(page: Browser) -> None:
    whole, shown = visible(page), picture(page)
    wire, memory = picture(page, "wire-chart"), picture(page, "memory-chart")

    def press(name: str) -> tuple[float, float]:
        page.evaluate(f"document.querySelector('[data-do={name}]').click()")
        page.settle()
        return visible(page)

    zoomed = press("in")
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert picture(page) != shown
    assert picture(page, "wire-chart") != wire
    assert picture(page, "memory-chart") != memory
    later = press("right")
    assert later[0] - zoomed[0] == pytest.approx(0.2 * (zoomed[1] - zoomed[0]))
    assert press("left") == pytest.approx(zoomed)
    assert press("all") == pytest.approx(whole)
    first = press("step")
    assert first == pytest.approx((0, 342e6))
    assert press("step")[0] == pytest.approx(342e6)
    assert press("out")[1] - visible(page)[0] == pytest.approx(2 * 342e6)
    press("all")
    assert picture(page) == shown


def test_the_wheel_zooms_at_the_pointer_and_lets_the_page_scroll(page: Browser) -> None:
    left, top, width, _ = rows_box(page)
    x, y = left + LEFT + (width - LEFT) * 0.25, top + 60
    whole = visible(page)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    assert visible(page) == whole, "without a click or Ctrl the page scrolls"
    rows_box(page)
    page.click(x, top + 2)
    page.mouse("mouseWheel", x, y, deltaX=0, deltaY=-200)
    page.wait_for(f"+document.getElementById('range').dataset.to < {whole[1]}")
    begin, end = visible(page)
    at = whole[0] + 0.25 * (whole[1] - whole[0])
    assert (at - begin) / (end - begin) == pytest.approx(0.25, abs=0.01)
    page.mouse("mouseWheel", x, y, deltaX=300, deltaY=0)
    page.wait_for(f"+document.getElementById('range').dataset.from > {begin + 1}")
    moved = visible(page)
    assert moved[1] - moved[0] == pytest.approx(end - begin)


def test_a_drag_moves_and_a_double_click_zooms(page: Browser) -> None:
    page.evaluate("document.querySelector('[data-do=in]').click()")
    left, top, width, _ = rows_box(page)
    begin, end = visible(page)
    x, y = left + width / 2, top + 40
    page.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    page.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    page.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    moved = visible(page)
    assert moved[0] - begin == pytest.approx(100 / (width - LEFT) * (end - begin), rel=0.05)
    assert page.evaluate("document.getElementById('span').textContent") == "Nothing is selected."
    for count in (1, 2):
        page.mouse("mousePressed", x, y, button="left", clickCount=count)
        page.mouse("mouseReleased", x, y, button="left", clickCount=count)
    closer = visible(page)
    assert closer[1] - closer[0] < (end - begin) / 2


def test_a_span_tells_its_bytes_and_its_rate(page: Browser) -> None:
    page.evaluate("document.getElementById('rows').focus()")
    page.key("n")
    page.key("ArrowDown")
    page.key("ArrowDown")
    page.key("Enter")
    text = page.evaluate("document.getElementById('span').textContent")
    for part in ("chunk 0", "row fetch", "16.8 MB (16777216)", "rate 49.34 GB/s", "slot 0"):
        assert part in text, text
    left, top, width, _ = rows_box(page)
    x = left + LEFT + (width - LEFT) / 2
    for y in range(int(top) + 30, int(top) + 140, 6):
        page.mouse("mouseMoved", x, y)
        tip = page.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
        if tip.startswith("chunk 0\n"):
            break
    assert "rate 49.34 GB/s" in tip, tip
    page.key("Escape")
    assert page.evaluate("document.getElementById('span').textContent") == "Nothing is selected."


def test_many_spans_in_a_pixel_are_summed_up(page: Browser) -> None:
    left, top, width, _ = rows_box(page)
    # Chunks of the first step, from 240 to 342 ms of 2.2 s, are narrower than a pixel.
    begin, end = visible(page)
    x = left + LEFT + (width - LEFT) * 290e6 / (end - begin)
    page.mouse("mouseMoved", x, top + 28 + 2 * 24 + 9)
    tip = page.evaluate("document.getElementById('tip').textContent")
    assert "spans of fetch in" in tip, tip
    assert "busy 9" in tip, tip
    assert "GB/s" in tip, tip


def test_everything_is_reached_and_done_with_keys(page: Browser) -> None:
    reached = []
    for _ in range(9 + 7):
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        page.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.slice(0, 20)"))
        style = page.evaluate("(s => [s.outlineStyle, s.outlineWidth])(getComputedStyle(document.activeElement))")
        assert style[0] != "none", f"{reached[-1]} shows no focus"
        assert style[1] != "0px", f"{reached[-1]} shows no focus"
    assert reached[9:] == ["Zoom in", "Zoom out", "\u2190", "\u2192", "All", "Next step", "rows"], reached
    page.evaluate("document.getElementById('rows').focus()")
    whole = visible(page)
    page.key("+")
    page.key("ArrowRight")
    assert visible(page)[0] > whole[0]
    page.key("-")
    page.key("0")
    assert visible(page) == pytest.approx(whole)


def test_two_fingers_zoom_and_one_moves(browser: Browser, plain: Path) -> None:
    browser.open(plain, width=360, height=740, touch=True)
    _, top, width, _ = rows_box(browser)
    whole = visible(browser)
    y = top + 60

    def touch(kind: str, *places: float) -> None:
        points = [{"x": x, "y": y, "id": number} for number, x in enumerate(places)]
        browser.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)
        browser.settle()

    touch("touchStart", width * 0.4, width * 0.6)
    touch("touchMove", width * 0.3, width * 0.7)
    touch("touchMove", width * 0.2, width * 0.8)
    touch("touchEnd")
    begin, end = visible(browser)
    assert (end - begin) / (whole[1] - whole[0]) == pytest.approx(1 / 3, rel=0.15)
    touch("touchStart", width * 0.6)
    touch("touchMove", width * 0.5)
    touch("touchMove", width * 0.4)
    touch("touchEnd")
    moved = visible(browser)
    assert moved[1] - moved[0] == pytest.approx(end - begin)
    assert moved[0] - begin == pytest.approx(0.2 * (end - begin), rel=0.3)
    assert browser.complaints() == []


def test_two_hundred_thousand_spans_open_and_zoom(browser: Browser, make: Callable[[dict[str, Any]], Path]) -> None:
    trace = traces.plain(steps=180)
    spans = sum(event["ph"] == "X" for event in trace["traceEvents"])
    assert spans > 200_000
    path = make(trace)
    browser.open(path)
    assert f"{spans} spans" in browser.evaluate("document.body.innerText")
    browser.evaluate(
        "(() => { const draw = CanvasRenderingContext2D.prototype.fillRect; window.drawn = 0;"
        " CanvasRenderingContext2D.prototype.fillRect = function (...a) { window.drawn++; draw.apply(this, a); }; })()"
    )
    pictures = set()
    for _ in range(14):
        browser.evaluate("window.drawn = 0; document.querySelector('[data-do=in]').click()")
        browser.settle()
        # At most a few for each column of pixels and each lane, however many spans there are.
        assert 0 < browser.evaluate("window.drawn") < 40_000
        pictures.add(picture(browser))
    assert len(pictures) == 14
    begin, end = visible(browser)
    assert end - begin < 5e6
    assert browser.complaints() == []
    assert path.stat().st_size < 60 * spans
