"""The page for everyone: axe (contrast AA, names, order of headings) in both schemes and languages, wide and on a phone."""

from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pytest

from tests.server.browser import opened, send_message, settled, sse
from tests.server.harness import Running

CHAT = "**/v1/chat/completions"
PHONE = {"width": 390, "height": 780}
WIDE = {"width": 1500, "height": 900}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
RICH = """<think>First *this*.</think>

#### A heading that is too low

A *wheel*, `race`, [a link](https://a.example), $x^2$ and a [second one](https://b.example).

> quoted

1. one

| a | b |
|---|---|
| 1 | 2 |

```python
def merge(a: list[int]) -> str:  # comment
    return f"{a[0]:.2f}" + 'x' * 10
```

```json
{"a": [1, true, null], "b": "text"}
```
"""


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core (MPL-2.0), from a package that carries it; it is no part of this project."""
    carrier = pytest.importorskip("axe_playwright_python", reason="axe-playwright-python is not installed (extra `dev`)")
    return (files(carrier) / "axe.min.js").read_text("utf-8")


def faults(page: Any, axe: str) -> list[str]:
    """Each rule that is broken, with the elements that break it."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(axe)
    page.evaluate("Promise.all(document.getAnimations().map((one) => one.effect.getTiming().iterations < 9 && one.finished))")
    said = page.evaluate("(rules) => axe.run({ runOnly: rules })", RULES)
    return [
        f"{broken['id']}: {node['target']} {node['any'][0]['message'] if node['any'] else ''} {node['html'][:120]}"
        for broken in said["violations"]
        for node in broken["nodes"]
    ]


def filled(page: Any) -> None:
    """An answer with all that Markdown has, one with an error, and one with tokens; one more is queued."""
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=sse({"content": RICH})))
    send_message(page, "Show me")
    settled(page)
    page.click(".thought summary")
    page.wait_for_selector(".thought em")
    page.unroute(CHAT)
    page.route(CHAT, lambda route: route.fulfill(status=400, json={"error": {"message": "no", "code": "invalid_value"}}))
    send_message(page, "Show me more")
    page.unroute(CHAT)
    send_message(page, "The mill", 12)
    page.wait_for_selector("#messages > li:nth-child(6) .figures")


def states(page: Any) -> list[Callable[[], object]]:
    """What leads from one state of the page to the next. The screen is wide: the settings are in sight at first."""
    return [
        lambda: page.fill("#set-temperature", "9"),
        lambda: (filled(page), page.keyboard.press("Alt+S")),
        lambda: (page.click("[aria-pressed] >> nth=-1"), page.focus(".token >> nth=2")),
        lambda: (page.hover("#conversations li"), page.click("#conversations .icon")),
        lambda: (
            page.keyboard.press("Escape"),
            page.keyboard.press("Alt+D"),
            page.wait_for_selector(".plot .line", state="attached"),
        ),
        lambda: (page.evaluate("document.activeElement.blur()"), page.keyboard.press("?")),
        lambda: (page.keyboard.press("Escape"), page.keyboard.press("Alt+D"), page.set_viewport_size(PHONE)),
        lambda: page.click("#open-side"),
        lambda: (page.click("#veil", position={"x": 380, "y": 400}), page.click("#open-panel")),
    ]


@pytest.mark.parametrize(
    ("scheme", "locale"),
    [
        ("light", "en-GB"),
        ("dark", "zh-CN"),
        pytest.param("light", "zh-CN", marks=pytest.mark.slow),
        pytest.param("dark", "en-GB", marks=pytest.mark.slow),
    ],
)
def test_axe_finds_nothing(chromium: Any, long_server: Running, axe: str, scheme: str, locale: str) -> None:
    for page in opened(chromium, long_server, locale=locale, color_scheme=scheme, viewport=WIDE, reduced_motion="reduce"):
        page.wait_for_selector("#status[data-state=ready]")
        assert faults(page, axe) == []
        for number, go in enumerate(states(page)):
            go()
            found = faults(page, axe)
            assert found == [], (number, found)


def test_axe_reports_known_faults(chromium: Any, server: Running, axe: str) -> None:
    """The control of the test above: too little contrast, a button without a name, a heading that skips a level."""
    for page in opened(chromium, server):
        page.wait_for_selector("#status[data-state=ready]")
        page.evaluate("document.querySelector('#empty p').style.color = '#a8b0b4'")
        page.evaluate("document.querySelector('#send').removeAttribute('aria-label')")
        page.evaluate("document.querySelector('#send').removeAttribute('title')")
        page.evaluate("document.querySelector('#empty h2').setAttribute('aria-level', '4')")
        found = {fault.partition(":")[0] for fault in faults(page, axe)}
        assert {"color-contrast", "button-name", "heading-order"} <= found
