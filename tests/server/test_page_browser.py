"""The page in a real Chromium, against a server of a tiny model."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser import MILLISECONDS, answers, opened, send_message, settled, sse, stored_conversations
from tests.server.harness import Running, until
from tests.server.test_page import HOSTILE

KEY = "a-long-enough-key"
BUSY = {"error": {"message": "the server is busy", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}}


def test_a_conversation_is_streamed_counted_and_stored(page: Any, server: Running) -> None:
    assert page.locator("#empty h2").inner_text() == "What would you like to ask?"
    send_message(page, "The mill")
    assert re.search(
        r"first token [\d.]+ m?s.*tokens/s.*8 tokens.*cut at the token limit", page.locator(".figures").inner_text(), re.DOTALL
    )
    sent = {"model": "tiny", "messages": [{"role": "user", "content": "The mill"}], "max_completion_tokens": 8, "seed": 1}
    whole = server.post("/v1/chat/completions", sent).json()["choices"][0]["message"]["content"]
    assert [message["content"] for message in stored_conversations(page)[0]["messages"]] == ["The mill", whole]
    send_message(page, "stands by")
    assert page.locator("#messages > li").count() == 4
    page.reload()
    assert page.locator("#messages > li").count() == 4
    assert page.locator(".user .body").all_inner_texts() == ["The mill", "stands by"]


def test_regenerate_edit_and_delete(page: Any) -> None:
    send_message(page, "The mill")
    first = answers(page)
    page.click("[title='Answer again']")
    page.wait_for_selector("#send:not([hidden])")
    assert answers(page) == first  # the same seed
    page.press("#prompt", "ArrowUp")
    page.fill(".user textarea", "Another question")
    page.press(".user textarea", "Enter")
    page.wait_for_selector("#send:not([hidden])")
    assert page.locator(".user .body").all_inner_texts() == ["Another question"]
    assert page.locator("#messages > li").count() == 2
    page.evaluate("() => { const wait = setTimeout; window.setTimeout = (work) => wait(work, 1e9); }")  # it can be undone
    page.hover("#conversations li")
    page.click("[title='More for “Another question”']")
    page.click("#menu button:has-text('Delete')")
    assert page.locator("#messages > li").count() == 0
    assert stored_conversations(page) == []
    page.click("#toast button")
    assert page.locator("#conversations .title").all_inner_texts() == ["Another question"]
    assert len(stored_conversations(page)) == 1


def test_stop_frees_the_request(page: Any, server: Running) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 400; })")
    with server.paused():
        page.fill("#prompt", "The mill")
        page.press("#prompt", "Enter")
        page.wait_for_selector(".dots")
        until(lambda: bool(server.llm.inflight))
        page.keyboard.press("Escape")
        until(lambda: not server.llm.inflight)
    page.wait_for_selector("#send:not([hidden])")
    assert "stopped" in page.locator(".figures").inner_text()


def test_tokens_show_probabilities_and_alternatives(page: Any) -> None:
    send_message(page, "The mill")  # recorded without being asked to
    page.click("[aria-pressed]")
    assert page.locator(".token").count() == 8
    page.hover(".token >> nth=0")
    rows = page.locator("#tip tr").all_inner_texts()
    assert len(rows) >= 5
    assert all("%" in row or "best" in row for row in rows)
    page.focus(".token >> nth=0")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    page.click("[aria-pressed=true]")
    assert page.locator(".token").count() == 0


def test_tokens_that_were_not_recorded_are_scored(page: Any) -> None:
    """The same tokens with the same probabilities; a text after another question has others."""
    send_message(page, "The mill")
    labels = "[...document.querySelectorAll('.token')].map((one) => one.getAttribute('aria-label'))"
    page.click("[aria-pressed]")
    recorded = page.evaluate(labels)
    assert len(recorded) == 8
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    assert page.locator(".token").count() == 0
    page.click("[aria-pressed]")
    page.wait_for_selector(".token")
    assert page.evaluate(labels) == recorded
    page.hover(".token >> nth=0")
    assert page.locator("#tip tr").count() >= 5
    said = stored_conversations(page)[0]
    said["messages"][0]["content"] = "Another question"
    page.evaluate("(one) => { localStorage[`headrace.conversation.${one.id}`] = JSON.stringify(one); }", said)
    page.reload()
    page.wait_for_selector("#status[data-state=ready]")
    page.click("[aria-pressed]")
    page.wait_for_selector(".token")
    assert page.evaluate(labels) != recorded


def test_cached_tokens_are_counted(page: Any) -> None:
    usage = {"completion_tokens": 1, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}
    body = f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n{sse({'content': 'so'})}"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    send_message(page, "The mill")
    assert "9 in the prompt, 7 of them cached" in page.locator(".figures").inner_text()


def test_the_settings_show_defaults_and_the_range_of_invalid_values(chromium: Any, server: Running) -> None:
    told = {"temperature": {"value": 0.2, "origin": "model"}, "top_k": {"value": 40, "origin": "elsewhere", "of": "there"}}
    tells = {"defaults": told}

    def models(route: Any) -> None:
        known = route.fetch().json()
        known["data"][0].pop("defaults", None)
        known["data"][0].update(tells)
        route.fulfill(json=known)

    for page in opened(chromium, server):
        page.route("**/v1/models", models)
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        page.keyboard.press("Alt+S")
        assert page.get_attribute("#set-temperature", "placeholder") == "0.2 · model"
        assert page.get_attribute("#set-top_k", "placeholder") == "40 · elsewhere"
        assert page.get_attribute("#set-top_k", "title") == "there"
        assert page.get_attribute("#set-top_p", "placeholder") == "1 · neutral"
        assert page.input_value("#set-temperature ~ input[type=range]") == "0.2"
        assert page.locator(".unknown").count() == 0
        page.fill("#set-temperature", "0.7")
        page.fill("#set-temperature", "9")
        assert page.locator("#set-temperature ~ .range").inner_text() == "0 to 2"
        assert page.get_attribute("#set-temperature", "aria-invalid") == "true"
        page.fill("#set-top_k", "-3")
        assert page.locator("#set-top_k ~ .range").inner_text() == "0 or more"
        page.fill("#set-seed", "x")
        assert page.locator("#set-seed ~ .range").is_visible()
        page.fill("#prompt", "The mill")
        with page.expect_request("**/v1/chat/completions") as caught:
            page.press("#prompt", "Enter")
        assert caught.value.post_data_json["temperature"] == 0.7  # the last good one
        assert not {"top_k", "top_p", "seed"} & set(caught.value.post_data_json)
        page.fill("#set-temperature", "")
        assert page.locator("#set-temperature ~ .range").is_hidden()
        assert page.input_value("#set-temperature ~ input[type=range]") == "0.2"
        page.wait_for_selector("#send:not([hidden])")
        tells.clear()  # a server that does not tell: no place of a slider may claim to know
        page.reload()
        page.wait_for_selector("#status[data-state=ready]")
        assert page.get_attribute("#set-top_p", "placeholder") == "model’s own"
        assert page.locator("#set-top_p ~ input.unknown").count() == 1


def test_sampling_settings_are_sent(page: Any) -> None:
    page.keyboard.press("Alt+S")
    for name, value in {
        "temperature": "0.5",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "max_tokens": "5",
        "seed": "7",
    }.items():
        page.fill(f"#set-{name}", value)
    page.fill("#set-system", "Be brief.")
    page.fill("#set-stop", "END\nSTOP")
    page.wait_for_selector("#status[data-state=ready]")
    page.fill("#prompt", "The mill")
    with page.expect_request("**/v1/chat/completions") as caught:
        page.press("#prompt", "Enter")
    body = caught.value.post_data_json
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    wanted = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_completion_tokens": 5,
        "seed": 7,
        "stop": ["END", "STOP"],
    }
    assert {name: body[name] for name in wanted} == wanted
    page.wait_for_selector("#send:not([hidden])")


def test_hostile_text_stays_text(page: Any) -> None:
    """As model text, as tokens with alternatives, and as the user's own."""
    page.wait_for_selector("#status[data-state=ready]")
    tokens = [{"token": text, "logprob": -0.5, "top_logprobs": [{"token": text, "logprob": -0.5}]} for text in HOSTILE]
    events = sse({"role": "assistant", "content": "\n\n".join(HOSTILE)}).splitlines()[0].removeprefix("data: ")
    chunk = json.loads(events)
    chunk["choices"][0]["logprobs"] = {"content": tokens}
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"),
    )
    page.fill("#prompt", " ".join(HOSTILE))
    page.press("#prompt", "Enter")
    page.wait_for_selector(".assistant .body p")
    settled(page)
    page.wait_for_timeout(300)  # for what must not happen
    assert "<script>window.hacked = 1</script>" in page.locator(".assistant .body").inner_text()
    page.click("[aria-pressed]")
    page.hover(".token >> nth=1")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#messages :is(script, img, iframe, form, style, base, meta)").count() == 0
    assert page.locator("#tip :is(script, img, iframe, form, style)").count() == 0


def test_the_policy_blocks_forced_html_and_scripts(chromium: Any, server: Running) -> None:
    """The control of the test above: HTML put on the page by force runs nothing, and is refused at the sink."""
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(MILLISECONDS)
    page.goto(server.base)
    assert "TrustedHTML" in page.evaluate(
        "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return String(error) } }"
    )
    script = "const s = document.createElement('div'); s.setAttribute('onclick', 'window.hacked = 1');"
    script += "document.body.append(s); s.click()"
    assert "TrustedScript" in page.evaluate("() => { try { " + script + " } catch (error) { return String(error) } }")
    assert page.evaluate("window.hacked") is None
    context.close()


def test_the_key_dialog_opens_and_reports_a_wrong_key(chromium: Any, tiny: Path) -> None:
    with Running(tiny, key=KEY) as locked:
        for page in opened(chromium, locked):
            page.wait_for_selector("#key-dialog[open]")
            page.fill("#key-value", "wrong-key-wrong-key")
            page.press("#key-value", "Enter")
            page.wait_for_selector("#key-why.wrong")
            page.fill("#key-value", KEY)
            page.press("#key-value", "Enter")
            send_message(page, "The mill")
            assert page.locator(".figures").count() == 1
            assert page.evaluate("Object.keys(localStorage).includes('headrace.key')") is False


def test_errors_show_their_cause(page: Any, server: Running) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    path = "**/v1/chat/completions"
    page.route(path, lambda route: route.fulfill(status=429, headers={"Retry-After": "5000"}, json=BUSY))
    page.fill("#prompt", "The mill")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".trouble:not([hidden])")
    assert "The server is busy" in page.locator(".trouble:visible").inner_text()
    assert re.search(r"Try again \(\d+ s\)", page.locator(".trouble:visible button").inner_text())
    broken = sse({"role": "assistant", "content": "half"}).replace(
        "data: [DONE]\n\n", 'data: {"error": {"message": "the engine process ended", "code": "engine_unavailable"}}\n\n'
    )
    page.unroute(path)
    page.route(path, lambda route: route.fulfill(content_type="text/event-stream", body=broken))
    page.click(".trouble button")
    page.wait_for_selector(".trouble strong:text('The engine is not ready')")
    assert answers(page) == ["half"]
    page.unroute(path)
    page.route(path, lambda route: route.abort())
    page.click(".trouble button")
    page.wait_for_selector(".trouble strong:text('The server cannot be reached')")
    page.unroute(path)
    page.click(".trouble button")
    page.wait_for_selector(".figures")
    assert page.locator(".trouble:not([hidden])").count() == 0


def test_the_dashboard_plots_running_requests(page: Any, server: Running) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    page.keyboard.press("Alt+D")
    page.wait_for_selector("#dashboard .plot")
    page.wait_for_selector(".plot .line", state="attached")
    assert page.locator(".plot").count() == 6
    times = page.locator(".legend b:text-matches('ms$')")
    for _ in range(100):  # a page that was held up forgets what it has seen
        server.complete(max_tokens=100, extra_body={"ignore_eos": True})
        page.wait_for_timeout(1000)
        if times.count() > 0:
            break
    assert times.count() > 0
    tops = [plot.locator(".tick.end").all_text_contents()[-2] for plot in page.locator(".plot").all()]
    assert all(float(top.removesuffix(" %").replace(",", "")) <= 100 for top in tops if "%" in top), tops
    page.hover(".plot svg >> nth=0")
    assert page.locator(".cursor").count() == 1


def test_percentiles_are_read_off_histograms(page: Any) -> None:
    code = "import('/page/figures.js').then((m) => m.percentile(new Map({0}), new Map({1}), {2}))"
    before, after = "[[0.1, 4], [0.2, 4], [Infinity, 4]]", "[[0.1, 4], [0.2, 14], [Infinity, 14]]"
    assert page.evaluate(code.format(before, after, 0.5)) == pytest.approx(0.15)
    assert page.evaluate(code.format(before, after, 0.9)) == pytest.approx(0.19)
    assert page.evaluate(code.format(after, after, 0.9)) is None
    assert page.evaluate(code.format("[]", "[[0.1, 0], [Infinity, 3]]", 0.9)) == pytest.approx(0.1)


def test_chinese_dark_and_a_phone(chromium: Any, server: Running) -> None:
    phone = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}
    for page in opened(chromium, server, **phone):
        page.wait_for_selector("#status[data-state=ready]")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 19, 22)"
        page.click("#open-side")
        page.click("#language")
        assert page.locator("#new").inner_text() == "新对话"
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(241, 244, 243)"
        page.click("#to-dashboard")
        page.wait_for_selector("#dashboard .plot")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_keyboard_reaches_every_action(page: Any) -> None:
    """Help, focus, sending, editing the last message, asking again, the panel, the dashboard and back, a new conversation."""
    page.wait_for_selector("#status[data-state=ready]")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("?")
    page.wait_for_selector("#help-dialog[open]")
    assert page.locator("#keys dt").count() >= 8
    page.keyboard.press("Escape")
    page.wait_for_selector("#help-dialog:not([open])", state="attached")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    send_message(page, "The mill")
    page.keyboard.press("ArrowUp")
    page.wait_for_selector(".user textarea:focus")
    page.keyboard.press("Escape")
    assert page.locator(".user .body").all_inner_texts() == ["The mill"]
    for view, again in (("#dashboard", "Alt+D"), ("#panel", "Alt+S")):
        shown = page.locator(view).is_visible()
        for wanted in (not shown, shown):
            page.keyboard.press(again)
            page.wait_for_selector(view, state="visible" if wanted else "hidden")
    with page.expect_request("**/v1/chat/completions"):
        page.keyboard.press("Alt+R")
    page.wait_for_selector("#send:not([hidden])")
    page.keyboard.press("Alt+N")
    page.wait_for_selector("#empty h2")
    assert page.locator("#messages > li").count() == 0


def test_a_conversation_on_a_dark_phone(chromium: Any, server: Running) -> None:
    """Wide code scrolls by itself; the page never gets wider than the screen, and what is touched is large enough."""
    wide = "```python\n" + "x = 1  # wide " * 20 + "\n```\n\n| a | b |\n|---|---|\n| " + "long" * 60 + " | 2 |\n\n" + "w" * 300
    phone = {"viewport": {"width": 390, "height": 780}, "is_mobile": True, "has_touch": True, "color_scheme": "dark"}
    for page in opened(chromium, server, **phone):
        page.wait_for_selector("#status[data-state=ready]")
        body = sse({"role": "assistant", "content": wide})
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))  # noqa: B023
        page.fill("#prompt", "Show me")
        page.tap("#send")
        page.wait_for_selector(".assistant .body pre")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.evaluate("(p => p.scrollWidth > p.clientWidth)(document.querySelector('.assistant pre'))")
        box = page.locator("#send").bounding_box()
        assert min(box["width"], box["height"]) >= 32
        assert box["x"] + box["width"] <= 390


def test_figures_of_several_models_are_summed_and_shares_are_not(page: Any) -> None:
    lines = [
        f'headrace:{name}{{model_name="{model}"}} {value}'
        for model, value in (("a", 0.25), ("b", 0.5))
        for name in ("x", "y_perc")
    ]
    code = "(text) => import('/page/figures.js').then((m) => m.parse(text).sums)"
    assert page.evaluate(code, "\n".join(["# HELP x", *lines])) == {"x": 0.75, "y_perc": 0.5}
