"""The page while the Markdown renderer is slow, busy or not yet started: the answer's text is on the screen all the same."""

from typing import Any

import pytest

from headrace.confined.pool import shared_pool
from headrace.server.page.markdown import COLOUR
from tests.server.browser import send_message, settled, sse
from tests.server.harness import Running, until

CODE = "A mill:\n\n```python\ndef grind(grain):\n    return grain\n```"
BUSY = {"error": {"message": "the renderer is busy", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}}


class Renderer:
    """Holds the page's rendering requests until the test lets them through."""

    def __init__(self, page: Any) -> None:
        self.held: list[Any] = []
        self._page = page
        page.route("**/page/render", self._hold)

    def _hold(self, route: Any) -> None:
        self.held.append(route)

    def release(self) -> None:
        held, self.held[:] = list(self.held), []
        for route in held:
            route.continue_()

    def wait(self) -> None:
        """Return once a request is held."""
        while not self.held:
            self._page.wait_for_timeout(10)


def answer_with(page: Any, text: str) -> None:
    body = sse({"role": "assistant", "content": text})
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_text_is_on_the_screen_while_the_renderer_is_held(page: Any) -> None:
    renderer = Renderer(page)
    answer_with(page, CODE)
    send_message(page, "Write code")
    page.wait_for_selector(".assistant .body.plain:has-text('def grind(grain):')")
    assert page.locator(".assistant .code").count() == 0
    assert page.locator(".assistant .body").inner_text().strip() == CODE
    renderer.wait()
    renderer.release()
    page.wait_for_selector(".assistant .code pre:has-text('def grind(grain):')")
    settled(page)
    assert page.locator(".assistant .body.plain").count() == 0


@pytest.mark.parametrize(
    ("first", "more", "place"),
    [
        ("one", " two", "p"),
        ("```python\na = 1\n", "b = 2", "pre code"),
        ("* one", " two", "li"),
        ("| a |\n|---|\n| 1 |", "\n\ntwo", ".body"),
    ],
)
def test_text_behind_a_late_rendering_follows_as_plain_text(page: Any, first: str, more: str, place: str) -> None:
    page.evaluate(
        "async (first) => { const { Markdown } = await import('/page/markdown.js'); const node = document.createElement('div');"
        "node.className = 'body'; document.body.append(node); window.answer = new Markdown(node); window.answer.set(first); }",
        first,
    )
    page.wait_for_selector("body > .body[data-settled]")
    renderer = Renderer(page)
    page.evaluate("(text) => window.answer.set(text)", first + more)
    page.wait_for_selector(f"body > .body{'' if place == '.body' else ' ' + place} > .tail")
    assert page.locator(".tail").text_content() == more
    renderer.wait()
    page.evaluate("(text) => window.answer.set(text, true)", first + more + " three")
    renderer.release()
    until_settled(page, renderer)
    assert page.locator(".tail").count() == 0
    assert "three" in page.locator("body > .body").inner_text()


def until_settled(page: Any, renderer: Renderer) -> None:
    while page.locator("body > .body[data-settled]").count() == 0:
        renderer.release()
        page.wait_for_timeout(10)


def test_an_answer_is_rendered_after_the_renderer_was_busy(page: Any) -> None:
    states: list[int] = []

    def render(route: Any) -> None:
        states.append(429 if not states else 200)
        if states[-1] == 429:
            route.fulfill(status=429, json=BUSY)
        else:
            route.continue_()

    page.route("**/page/render", render)
    answer_with(page, CODE)
    send_message(page, "Write code")
    page.wait_for_selector(".assistant .code pre:has-text('def grind(grain):')")
    assert states[:2] == [429, 200]


def test_no_code_box_is_empty_while_its_text_streams(page: Any) -> None:
    page.evaluate(
        "async () => { const { Markdown } = await import('/page/markdown.js'); const node = document.createElement('div');"
        "node.className = 'body'; document.body.append(node); window.answer = new Markdown(node);"
        "window.answer.set('Code:\\n\\n```python\\n'); }"
    )
    page.wait_for_selector("body > .body[data-settled] > p")
    assert page.locator("body > .body .code").count() == 0
    page.evaluate("window.answer.set('Code:\\n\\n```python\\nx = 1')")
    page.wait_for_selector("body > .body .code")


def test_the_server_starts_a_renderer() -> None:
    shared_pool().close()
    shared_pool()._known.clear()  # an answer that another test's server has asked for needs no process
    assert not renderers()
    with Running("nothing", begin=False, wait=False):
        until(lambda: renderers() > 0)


def renderers() -> int:
    """Confined processes that render Markdown."""
    return sum(worker.kind[:2] == (COLOUR.module, COLOUR.argument) for worker in shared_pool().workers)
