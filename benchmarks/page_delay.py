"""Delay between a streamed token and its text on the page, for the first answer of a fresh server, under load.

    python -m benchmarks.page_delay MODEL [--load 4] [--runs 3]

Needs Playwright and Chromium. `--load` busy processes run during the answer. Prints one line a run: milliseconds from the
arrival of a chunk in the browser until its text is in the page, and from sending the message until the first text.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

from benchmarks.busy import busy

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROMPT = "Write a Python function that merges two sorted lists"
# Records [time, letters] of the text that arrived and of the text in the page. Only letters count: Markdown's marks vanish.
RECORD = """
(() => {
  const letters = (text) => text.replace(/[^\\p{L}\\p{N}]/gu, "").length;
  const record = (window.record = { sent: 0, arrived: [], seen: [] });
  const send = window.fetch;
  window.fetch = async (path, options) => {
    if (!String(path).includes("/v1/chat/completions")) return send(path, options);
    record.sent = performance.now();
    const response = await send(path, options);
    const [page, mine] = response.body.tee();
    (async () => {
      let [text, rest] = ["", ""];
      const decoder = new TextDecoder();
      for await (const bytes of mine) {
        const parts = (rest + decoder.decode(bytes, { stream: true })).split("\\n\\n");
        rest = parts.pop();
        for (const part of parts) {
          if (part.startsWith("data: {")) text += JSON.parse(part.slice(6)).choices[0]?.delta.content ?? "";
        }
        // the language of a block of code is not part of the rendered text
        record.arrived.push([performance.now(), letters(text.replace(/```\\w*/g, ""))]);
      }
    })();
    return new Response(page, { status: response.status, headers: response.headers });
  };
  const look = () => {
    const body = document.querySelector(".assistant:last-child .body");
    if (body) {
      const copy = body.cloneNode(true);
      for (const bar of copy.querySelectorAll(".bar")) bar.remove();
      const count = letters(copy.textContent.replace(/```\\w*/g, ""));
      if (count !== record.seen.at(-1)?.[1]) record.seen.push([performance.now(), count]);
    }
    requestAnimationFrame(look);
  };
  look();
})();
"""


@contextlib.contextmanager
def serving(model: str) -> Iterator[str]:
    """A fresh server; yields its address as soon as the model is ready."""
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"the page is (\S+)/", line):
                yield found[1]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def measure(page: Page, base: str) -> tuple[float, list[float]]:
    """Milliseconds until the first text, and the delay of each chunk."""
    page.add_init_script(RECORD)
    page.goto(base)
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 120; m.settings.seed = 1; })")
    page.wait_for_selector("#status[data-state=ready]")
    page.fill("#prompt", PROMPT)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".assistant .body[data-settled]")
    record = json.loads(page.evaluate("new Promise((done) => setTimeout(() => done(JSON.stringify(window.record)), 100))"))
    delays = []
    for at, letters in record["arrived"]:
        shown = next((time for time, count in record["seen"] if count >= letters), None)
        if letters and shown is not None:
            delays.append(max(0.0, shown - at))
    first = next(time for time, count in record["seen"] if count) - record["sent"]
    return first, sorted(delays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(options.runs):
            with busy(options.load), serving(options.model) as base:
                first, delays = measure(browser.new_page(locale="en-GB"), base)
            p50, p99 = delays[len(delays) // 2], delays[int(len(delays) * 0.99)]
            print(
                f"first text {first:.0f} ms; chunk to screen p50 {p50:.0f}, p99 {p99:.0f}, "
                f"maximum {delays[-1]:.0f} ms over {len(delays)} chunks"
            )
        browser.close()


if __name__ == "__main__":
    main()
