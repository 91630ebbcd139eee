"""The pictures of the page in docs/images, taken from a running server with Chromium: tools/page_images.py URL [CHINESE_URL]

The second server has a model that knows Chinese; without one that picture is left out. It needs a font for it, as Debian's
fonts-noto-cjk. The figures under the answers are of the moment: take them while nothing else runs.
"""

import argparse
import base64
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

OUT = Path(__file__).parents[1] / "docs" / "images"
WIDE = {"viewport": {"width": 1440, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 1.5, "is_mobile": True, "has_touch": True}
MILLISECONDS = 300_000
TO_WEBP = """async (png) => {
  const picture = await createImageBitmap(await (await fetch(`data:image/png;base64,${png}`)).blob());
  const canvas = Object.assign(document.createElement("canvas"), { width: picture.width, height: picture.height });
  canvas.getContext("2d").drawImage(picture, 0, 0);
  return canvas.toDataURL("image/webp", 0.9).split(",")[1];
}"""


def keep(browser: Browser, page: Page, name: str) -> None:
    """Save what is seen as WebP, which is a third of PNG."""
    blank = browser.new_page()
    data = blank.evaluate(TO_WEBP, base64.b64encode(page.screenshot()).decode())
    blank.close()
    OUT.mkdir(exist_ok=True)
    (OUT / f"{name}.webp").write_bytes(base64.b64decode(data))


def ask(page: Page, text: str, limit: int) -> None:
    """One message and its answer, with a seed."""
    page.evaluate(
        "(most) => import('/page/storage.js').then((m) => { m.settings.max_tokens = most; m.settings.seed = 1; })", limit
    )
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#stop:not([hidden])")
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".assistant:last-child .body[data-settled]")
    page.evaluate("document.querySelector('#scroll').scrollTop = 1e6")
    page.wait_for_timeout(300)


def chat(browser: Browser, page: Page) -> None:
    ask(page, "Write a Python function that merges two sorted lists", 120)
    ask(page, "Why is the sky blue? Two sentences.", 70)
    keep(browser, page, "chat")
    page.click("[aria-pressed] >> nth=-1")
    page.evaluate("document.querySelector('#scroll').scrollTop = 1e6")
    page.hover(".token >> nth=11")
    page.wait_for_timeout(300)
    keep(browser, page, "tokens")


def dashboard(browser: Browser, page: Page) -> None:
    for number in range(3):
        ask(page, f"Give me {number + 2} names for a small bakery", 100)
    page.keyboard.press("Alt+D")
    page.wait_for_selector(".plot .line", state="attached")
    page.wait_for_timeout(2000)
    keep(browser, page, "dashboard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("chinese", nargs="?")
    given = parser.parse_args()
    shots: list[tuple[str, dict[str, Any], Callable[[Browser, Page], None]]] = [
        (given.url, WIDE, chat),
        (given.url, WIDE, dashboard),
        (given.url, PHONE, lambda browser, page: one(browser, page, "phone", "Explain how a water wheel works, for a child")),
        (given.url, {**WIDE, "color_scheme": "dark"}, lambda browser, page: one(browser, page, "dark", "Name three rivers")),
    ]
    if given.chinese:
        question = "用 Python 写一个合并两个有序列表的函数，并简短说明"
        shots.append(
            (given.chinese, {**WIDE, "locale": "zh-CN"}, lambda browser, page: one(browser, page, "chinese", question))
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for url, options, take in shots:
            context = browser.new_context(**{"locale": "en-GB", **options})
            page = context.new_page()
            page.set_default_timeout(MILLISECONDS)
            page.goto(url)
            page.wait_for_selector("#status[data-state=ready]")
            take(browser, page)
            context.close()


def one(browser: Browser, page: Page, name: str, question: str) -> None:
    ask(page, question, 140)
    keep(browser, page, name)


if __name__ == "__main__":
    main()
