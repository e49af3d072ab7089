"""The page in a real browser: what it shows, how it is used, and that it loads and complains about nothing."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pypdf
import pytest
import traces

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from browser import Browser

LEFT = 132
"""Where the charts begin, in pixels, on a wide page."""

CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const owner = node.parentElement;
    if (!node.textContent.trim() || !owner.checkVisibility() || ["SCRIPT", "STYLE"].includes(owner.tagName)) continue;
    texts.push([contrast(parse(getComputedStyle(owner).color), behind(owner)), node.textContent.trim().slice(0, 30)]);
  }
  const page = behind(document.body), style = getComputedStyle(document.documentElement);
  const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const names = [...document.styleSheets[0].cssRules[0].style].filter((name) => /^--(c-|s-|limit|focus)/.test(name));
  const shapes = names.map((name) => [contrast(hex(style.getPropertyValue(name).trim()), page), name]);
  return { page, texts, shapes };
})()"""


def visible(browser: Browser) -> tuple[float, float]:
    """Return the visible range."""
    begin, end = browser.evaluate("(({dataset: d}) => [+d.from, +d.to])(document.getElementById('range'))")
    return begin, end


def rows_box(browser: Browser) -> tuple[float, float, float, float]:
    """Return left, top, width and height of the timeline, scrolled into view."""
    browser.evaluate("document.getElementById('rows').scrollIntoView({block: 'center'})")
    browser.settle()
    box = browser.evaluate(
        "(({left, top, width, height}) => [left, top, width, height])(document.getElementById('rows').getBoundingClientRect())"
    )
    return box[0], box[1], box[2], box[3]


def picture(browser: Browser, canvas: str = "rows") -> str:
    """Return what a chart shows."""
    return browser.evaluate(f"document.getElementById('{canvas}').toDataURL()")


def colours(browser: Browser, canvas: str) -> set[str]:
    """Return the names of the colours that a chart has, as whole pixels."""
    return set(
        browser.evaluate(
            f"""(() => {{
              const canvas = document.getElementById('{canvas}');
              const dots = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
              const found = new Set();
              for (let i = 0; i < dots.length; i += 4) found.add((dots[i] << 16) | (dots[i + 1] << 8) | dots[i + 2]);
              const style = getComputedStyle(document.documentElement);
              return [...document.styleSheets[0].cssRules[0].style].filter((name) => /^--(c-|s-|limit)/.test(name))
                .filter((name) => found.has(parseInt(style.getPropertyValue(name).trim().slice(1), 16)));
            }})()"""
        )
    )


@pytest.fixture
def page(browser: Browser, plain: Path) -> Browser:
    browser.open(plain)
    return browser


def test_it_shows_rows_charts_and_tables(page: Browser) -> None:
    drawn = colours(page, "rows")
    for name in ("forward", "backward", "step", "fetch", "update", "store", "activation_store", "activation_fetch", "save"):
        assert f"--c-{name}" in drawn, name
    assert {"--c-fetch", "--c-store", "--limit"} <= colours(page, "wire-chart")
    assert {"--s-0", "--s-1"} <= colours(page, "memory-chart")
    text = page.evaluate("document.body.innerText")
    for part in (
        "The wire is idle for 128 ms of each backward: overlap_step would hide about 102 ms per step.",
        "while busy, 96 % of the limit",
        "Limit: 55.1 GB/s to the device, 55.0 GB/s from it, 50.4 GB/s each way with both ways busy.",
        "Waits of each step",
        "NVIDIA H200",
        "chunk_bytes",
    ):
        assert part in text, part
    captions = page.evaluate("[...document.querySelectorAll('caption')].map(one => one.textContent)")
    assert {"Copies over the wire", "Passes as the device ran them", "Memory", "Layer by layer"} <= set(captions)
    assert page.evaluate("document.querySelectorAll('#steps tbody tr').length") == 6
    assert page.evaluate("document.querySelectorAll('#plan tbody tr').length") == 2 + 8


def test_it_loads_nothing_and_complains_about_nothing(page: Browser, plain: Path) -> None:
    for key in ("+", "ArrowRight", "n", "s"):
        page.evaluate("document.getElementById('rows').focus()")
        page.key(key)
    page.pdf()
    page.settle()
    assert [url for url in page.requests() if not url.startswith("data:")] == [plain.as_uri()]
    assert page.complaints() == []


def test_the_policy_stops_other_scripts_and_connections(page: Browser) -> None:
    page.evaluate(
        "(() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1'; document.body.append(one); })()"
    )
    assert page.evaluate("window.ran === undefined")
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'stopped')") == "stopped"
    assert len([text for text in page.complaints() if "Content Security Policy" in text]) >= 2
    assert page.evaluate("document.querySelectorAll('[style]:not(canvas):not(#tip)').length") == 0


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
    assert ["Zoom in", "Zoom out", "\u2190", "\u2192", "All", "Next step", "rows"] == reached[9:], reached
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
    for part in ("forebay report: run.json", "overlap_step would hide", "Waits of each step", "Layer by layer", "chunk_bytes"):
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


def test_a_merged_trace_shows_all_ranks_or_one(browser: Browser, merged: Path) -> None:
    browser.open(merged)

    def shown() -> list[str]:
        return browser.evaluate(
            "[...document.querySelectorAll('#summary [data-rank]')].filter(one => !one.hidden).map(one => one.dataset.rank)"
        )

    assert shown() == ["all", "0", "1"]
    assert "Rank 1 waits most." in browser.evaluate("document.body.innerText")
    tall = browser.evaluate("document.getElementById('rows').clientHeight")
    both = visible(browser)

    def choose(rank: str) -> None:
        browser.evaluate(
            f"(one => {{ one.value = '{rank}'; one.dispatchEvent(new Event('change')); }})(document.getElementById('rank'))"
        )
        browser.settle()

    choose("0")
    assert shown() == ["0"]
    assert browser.evaluate("document.getElementById('rows').clientHeight") < 0.6 * tall
    assert visible(browser)[1] < both[1]
    assert browser.evaluate("document.querySelectorAll('#steps tbody tr').length") == 12
    assert browser.evaluate("[...document.querySelectorAll('#steps tbody tr')].filter(r => r.checkVisibility()).length") == 6
    choose("all")
    assert visible(browser) == both
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


def test_what_a_trace_says_is_text(browser: Browser, make: Callable[[dict[str, Any]], Path]) -> None:
    trace = traces.plain(steps=2, chunks=5)
    evil = "</script><img src=x onerror='window.ran=1'><script>window.ran=1</script>"
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 3:
            event["name"] = evil
    about = trace["forebay"]
    about["machine"]["name"] = about["optimizers"][0]["name"] = about["activations"][0]["explain"] = evil
    browser.open(make(trace))
    assert browser.evaluate("window.ran === undefined && document.querySelectorAll('img').length === 0")
    assert evil in browser.evaluate("document.querySelector('header p').textContent")
    assert browser.complaints() == []


def test_without_a_limit_it_says_how_to_give_one(browser: Browser, make: Callable[[dict[str, Any]], Path]) -> None:
    browser.open(make(traces.plain(limit=False)))
    text = browser.evaluate("document.getElementById('wire').innerText")
    assert "No limit of the wire is known" in text
    assert "forebay report run.json --wire-gbps 50 -o report.html" in text
    assert "--limit" not in colours(browser, "wire-chart")


def test_it_is_made_of_headings_tables_and_names(page: Browser) -> None:
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.evaluate("document.querySelectorAll('h1').length") == 1
    assert page.evaluate("[...document.querySelectorAll('section')].every(one => one.querySelector('h2').id === one.getAttribute('aria-labelledby'))")
    assert page.evaluate("[...document.querySelectorAll('table')].every(one => one.caption && one.querySelector('th[scope=row]'))")
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    focusable = [
        node
        for node in nodes
        if any(one["name"] == "focusable" and one["value"]["value"] for one in node.get("properties", ()))
        and node["role"]["value"] not in ("RootWebArea", "generic", "DisclosureTriangle")
    ]
    assert len(focusable) > 20
    unnamed = [node["role"]["value"] for node in focusable if not node.get("name", {}).get("value")]
    assert [role for role in unnamed if role != "LabelText"] == []
