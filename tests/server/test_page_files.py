"""Text files in a message on the page: chosen, dropped or pasted; invalid files are refused in one line."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.browser import opened, send_message, stored_conversations
from tests.server.harness import Running

NOTES = {"name": "notes.txt", "mimeType": "text/plain", "buffer": "The mill\r\n水轮\n\n".encode()}
QUOTED = "notes.txt:\n```\nThe mill\n水轮\n```"
REFUSED = [
    ("wheel.png", b"\x89PNG\r\n\x1a\n\xff\xfe", "wheel.png is not text: only UTF-8 text can be added", "wheel.png 不是文本"),
    ("zeros.bin", b"ab\0cd", "zeros.bin is not text", "zeros.bin 不是文本"),
    ("empty.txt", b" \n", "empty.txt is empty.", "empty.txt 是空文件。"),
    ("long.txt", b"a" * 9000, "long.txt is 9.0 kB; the model’s context holds at most 1.5 kB.", "最多容纳 1.5 kB"),
]
HANDED = """([at, kind, files]) => {
  const data = new DataTransfer();
  for (const [name, text] of files) data.items.add(new File([text], name, { type: "text/plain" }));
  if (kind === "paste+text") data.setData("text/plain", "words");
  const event = kind.startsWith("paste")
    ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector(at).dispatchEvent(event);
  return event.defaultPrevented;
}"""


def ready(page: Any) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    # Choosers are caught from here on: turned on with each choice, that may come after the keys.
    page.on("filechooser", lambda _: None)


def choose(page: Any, *files: dict[str, Any], keys: str = "") -> None:
    with page.expect_file_chooser() as caught:
        page.keyboard.press(keys) if keys else page.click("#attach")
    caught.value.set_files(list(files))


def hand(page: Any, at: str, kind: str, *files: Sequence[str]) -> bool:
    """Whether the page took what was dragged, dropped or pasted, in place of the browser."""
    taken: bool = page.evaluate(HANDED, [at, kind, list(files)])
    return taken


def written(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.querySelector('#prompt').value === text", arg=text)


def test_a_file_is_text_of_the_message(page: Any) -> None:
    ready(page)
    page.fill("#prompt", "What is this?")
    choose(page, NOTES, {**NOTES, "name": "more.md", "buffer": b"````\na ```` fence"})
    both = f"What is this?\n\n{QUOTED}\n\nmore.md:\n`````\n````\na ```` fence\n`````\n\n"
    written(page, both)
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("Say it.")
    written(page, both + "Say it.")
    send_message(page, QUOTED)
    assert page.locator(".user .body").inner_text() == QUOTED
    assert stored_conversations(page)[0]["messages"][0]["content"] == QUOTED, (
        "it is kept, exported and sent again as any message"
    )
    choose(page, NOTES, keys="Alt+a")
    written(page, f"{QUOTED}\n\n")
    assert page.locator("#send").is_enabled()


def test_files_are_dropped_and_pasted(page: Any) -> None:
    ready(page)
    note = ("notes.txt", "The mill\r\n水轮\n\n")
    assert hand(page, "#messages", "dragover", note)
    assert page.locator("#chat.dropping").count() == 1
    assert hand(page, "#side", "drop", note), "wherever it is dropped, the page stays"
    written(page, f"{QUOTED}\n\n")
    assert page.locator("#chat.dropping").count() == 0
    assert hand(page, "#prompt", "paste", note)
    written(page, f"{QUOTED}\n\n{QUOTED}\n\n")
    assert not hand(page, "#prompt", "paste+text", note), "what has words is pasted as words"
    assert not hand(page, "#prompt", "paste"), "and so is what has no file"
    page.keyboard.press("Alt+D")
    page.wait_for_selector("#dashboard", state="visible")
    assert hand(page, "#stage", "drop", note)
    page.keyboard.press("Alt+D")
    page.wait_for_selector("#dashboard", state="hidden")
    assert hand(page, "#messages", "drop", ("b", "c"))
    written(page, f"{QUOTED}\n\n{QUOTED}\n\nb:\n```\nc\n```\n\n")  # and nothing of what fell on the dashboard


@pytest.mark.parametrize("locale", ["en-GB", "zh-CN"])
def test_binary_and_oversized_files_are_refused_in_one_line(chromium: Any, server: Running, locale: str) -> None:
    for page in opened(chromium, server, locale=locale):
        ready(page)
        for name, data, english, chinese in REFUSED:
            choose(page, {"name": name, "mimeType": "application/octet-stream", "buffer": data})
            page.wait_for_selector(f"#toast:has-text('{english if locale == 'en-GB' else chinese}')")
        assert page.input_value("#prompt") == ""
        choose(page, {"name": "empty.txt", "mimeType": "text/plain", "buffer": b""}, NOTES)
        written(page, f"{QUOTED}\n\n")  # one of them is no reason to leave the other
