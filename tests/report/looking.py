"""What tests look at on a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from browser import Browser

LEFT = 132
"""Where the charts begin, in pixels, on a wide page."""

CONTRAST = """(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => [r, g, b].map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
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
        "(box => [box.left, box.top, box.width, box.height])(document.getElementById('rows').getBoundingClientRect())"
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
