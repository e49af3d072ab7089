"""What the page shows, and that it loads and complains about nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traces
from looking import colours, visible

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from browser import Browser


def test_it_shows_rows_charts_and_tables(page: Browser) -> None:
    drawn = colours(page, "rows")
    for name in (
        "forward",
        "backward",
        "step",
        "fetch",
        "update",
        "store",
        "activation_store",
        "activation_fetch",
        "save",
    ):
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
        "(() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1';"
        " document.body.append(one); })()"
    )
    assert page.evaluate("window.ran === undefined")
    assert page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'stopped')") == "stopped"
    assert len([text for text in page.complaints() if "Content Security Policy" in text]) >= 2
    assert page.evaluate("document.querySelectorAll('[style]:not(canvas):not(#tip)').length") == 0


def test_a_merged_trace_shows_all_ranks_or_one(browser: Browser, merged: Path) -> None:
    browser.open(merged)

    def shown() -> list[str]:
        return browser.evaluate(
            "[...document.querySelectorAll('#summary [data-rank]')].filter(one => !one.hidden)"
            ".map(one => one.dataset.rank)"
        )

    assert shown() == ["all", "0", "1"]
    assert "Rank 1 waits most." in browser.evaluate("document.body.innerText")
    tall = browser.evaluate("document.getElementById('rows').clientHeight")
    both = visible(browser)

    def choose(rank: str) -> None:
        browser.evaluate(
            f"(one => {{ one.value = '{rank}'; one.dispatchEvent(new Event('change')); }})"
            "(document.getElementById('rank'))"
        )
        browser.settle()

    choose("0")
    assert shown() == ["0"]
    assert browser.evaluate("document.getElementById('rows').clientHeight") < 0.6 * tall
    assert visible(browser)[1] < both[1]
    assert browser.evaluate("document.querySelectorAll('#steps tbody tr').length") == 12
    assert (
        browser.evaluate("[...document.querySelectorAll('#steps tbody tr')].filter(r => r.checkVisibility()).length")
        == 6
    )
    choose("all")
    assert visible(browser) == both
    assert browser.complaints() == []


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
    assert page.evaluate(
        "[...document.querySelectorAll('section')]"
        ".every(one => one.querySelector('h2').id === one.getAttribute('aria-labelledby'))"
    )
    assert page.evaluate(
        "[...document.querySelectorAll('table')].every(one => one.caption && one.querySelector('th[scope=row]'))"
    )
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
