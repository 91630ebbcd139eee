"""Helpers for tests that drive the page in a real Chromium."""

import json
import shutil
from collections.abc import Iterator
from typing import Any

from tests.server.harness import Running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MILLISECONDS = 180_000  # until a test gives up


def opened(chromium: Any, server: Running, **options: Any) -> Iterator[Any]:
    """A fresh browser profile on the page; errors in its console fail the test."""
    context = chromium.new_context(**{"locale": "en-GB", **options})
    page = context.new_page()
    page.set_default_timeout(MILLISECONDS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None)
    away: list[str] = []
    page.on("request", lambda request: away.append(request.url) if not request.url.startswith(server.base) else None)
    page.goto(server.base)
    yield page
    context.close()
    assert wrong == []
    assert away == []


def send_message(page: Any, text: str, limit: int = 8) -> None:
    """Send a message and wait for the whole answer."""
    page.evaluate(f"import('/page/storage.js').then((m) => {{ m.settings.max_tokens = {limit}; m.settings.seed = 1; }})")
    page.wait_for_selector("#status[data-state=ready]")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send:not([hidden])")


def settled(page: Any) -> None:
    """Wait until all that the model said is shown."""
    unsettled = ".assistant.running, .assistant .body:not([data-settled])"
    page.wait_for_selector(f"#messages:not(:has({unsettled}))", state="attached")


def answers(page: Any) -> list[str]:
    settled(page)
    return [text.strip() for text in page.locator(".assistant .body").all_inner_texts()]


def sse(*deltas: dict[str, Any]) -> str:
    chunks = [{"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def stored_conversations(page: Any) -> list[dict[str, Any]]:
    """The conversations that the browser keeps."""
    items = "Object.entries(localStorage).filter(([name]) => name.startsWith('headrace.conversation.'))"
    found: list[dict[str, Any]] = page.evaluate(f"{items}.map(([, one]) => JSON.parse(one))")
    return found
