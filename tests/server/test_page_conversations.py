"""Conversations on the page: their address, list and files, what a reload leaves, queueing, going on, too long a prompt."""

import json
import re
from pathlib import Path
from typing import Any

from headrace.workflows.conversation import Conversation
from tests.server.browser import answers, opened, send_message, settled, sse, stored_conversations
from tests.server.harness import Running

CHAT = "**/v1/chat/completions"


def send_text(page: Any, text: str) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def test_a_conversation_has_an_address_and_a_reload_keeps_it(page: Any, server: Running) -> None:
    send_message(page, "The mill")
    address = page.url
    assert re.fullmatch(re.escape(server.base) + r"/#chat/[\w-]+", address)
    assert page.title() == "The mill · tiny · Headrace"
    page.reload()
    assert page.locator(".user .body").all_inner_texts() == ["The mill"]
    page.keyboard.press("Alt+N")
    page.wait_for_selector("#empty h2")
    send_message(page, "Another")
    assert page.url != address
    page.go_back()
    page.wait_for_selector(".user .body:text('The mill')")
    other = page.context.new_page()
    other.goto(address)
    other.wait_for_selector(".user .body:text('The mill')")
    other.goto(server.base + "/#chat/nowhere")
    other.wait_for_selector("#toast:has-text('no conversation at this address')")
    assert other.locator("#messages > li").count() == 0


def test_two_tabs_do_not_overwrite_each_other(page: Any, server: Running) -> None:
    other = page.context.new_page()
    other.goto(server.base)
    send_message(page, "The mill")
    send_message(other, "Another")
    page.wait_for_selector("#conversations .title:text('Another')")  # what one tab keeps comes to the other in a while
    assert sorted(one["title"] for one in stored_conversations(page)) == ["Another", "The mill"]
    page.reload()
    assert sorted(page.locator("#conversations .title").all_inner_texts()) == ["Another", "The mill"]


def test_rename_search_and_export(page: Any, tmp_path: Path) -> None:
    send_message(page, "The mill")
    said = stored_conversations(page)[0]["messages"][1]["content"]
    page.keyboard.press("Alt+N")
    send_message(page, "A lantern")
    page.hover("#conversations li:has-text('The mill')")
    page.click("[title='More for “The mill”']")
    page.click("#menu button:has-text('Rename')")
    page.fill("#conversations .rename", "Wheels & water")
    page.press("#conversations .rename", "Enter")
    assert page.locator("#conversations .title").all_inner_texts() == ["A lantern", "Wheels & water"]
    page.fill("#search", "WHEELS")
    assert page.locator("#conversations .title").all_inner_texts() == ["Wheels & water"]
    page.fill("#search", "the mill")  # in what was said
    assert page.locator("#conversations .title").all_inner_texts() == ["Wheels & water"]
    page.fill("#search", "nothing like it")
    assert page.locator("#conversations").inner_text() == "No conversation contains these words."
    page.fill("#search", "wheels")
    files = {}
    for kind in ("Markdown", "JSON"):
        page.hover("#conversations li")
        page.click("#conversations .icon")
        with page.expect_download() as caught:
            page.click(f"#menu button:has-text('Export as {kind}')")
        files[kind] = (caught.value.suggested_filename, Path(caught.value.path()).read_text("utf-8"))
    assert files["Markdown"] == ("Wheels-water.md", f"# Wheels & water\n\n**You**\n\nThe mill\n\n**tiny**\n\n{said}\n")
    name, text = files["JSON"]
    assert name == "Wheels-water.json"
    made = json.loads(text)
    assert made["messages"] == [{"role": "user", "content": "The mill"}, {"role": "assistant", "content": said}]
    assert (made["title"], made["answers"][0]["tokens"], made["answers"][0]["finish_reason"]) == ("Wheels & water", 8, "length")


def load(page: Any, path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    with page.expect_file_chooser() as caught:
        page.click("#load")
    caught.value.set_files(path)


def test_an_exported_conversation_is_imported(page: Any, server: Running, tmp_path: Path) -> None:
    send_message(page, "The mill")
    (before,) = stored_conversations(page)
    page.hover("#conversations li")
    page.click("#conversations .icon")
    with page.expect_download() as caught:
        page.click("#menu button:has-text('Export as JSON')")
    exported = Path(caught.value.path()).read_text("utf-8")
    load(page, tmp_path / "talk.json", exported)
    page.wait_for_function("() => document.querySelectorAll('#conversations .title').length === 2")
    one, two = sorted(stored_conversations(page), key=lambda found: found["made"])
    assert page.url == f"{server.base}/#chat/{two['id']}" != f"{server.base}/#chat/{one['id']}"
    assert (one["title"], one["messages"]) == (before["title"], before["messages"])
    assert two["title"] == one["title"]
    for old, new in zip(one["messages"], two["messages"], strict=True):
        assert all(new.get(name) == old.get(name) for name in ("role", "content", "model", "finish", "thought"))
    assert two["messages"][1]["figures"]["tokens"] == 8
    assert answers(page) == [one["messages"][1]["content"].strip()]
    send_message(page, "And then?")
    assert len(next(found for found in stored_conversations(page) if found["id"] == two["id"])["messages"]) == 4, "it goes on"


def test_a_conversation_of_the_terminal_is_imported_and_invalid_files_are_refused(page: Any, tmp_path: Path) -> None:
    talk = Conversation(system="Be brief.")
    talk.ask("The mill")
    talk.answer("It <b>grinds</b>.")
    talk.save(tmp_path / "talk.json", "smollm2")
    load(page, tmp_path / "again.json", (tmp_path / "talk.json").read_text("utf-8"))
    page.wait_for_selector("#toast:has-text('Be brief.')")
    assert page.title().startswith("The mill · ")
    assert page.locator(".user .body").all_inner_texts() == ["The mill"]
    assert answers(page) == ["It <b>grinds</b>."]
    assert [one["messages"][1]["model"] for one in stored_conversations(page)] == ["smollm2"]
    for number, wrong in enumerate(
        ("no JSON", "[]", '{"messages": []}', '{"messages": [{"role": "user", "content": 5}]}', "null")
    ):
        load(page, tmp_path / f"wrong{number}.json", wrong)
        page.wait_for_selector(f"#toast:has-text('wrong{number}.json is not a conversation')")
    assert len(stored_conversations(page)) == 1


def test_conversations_of_the_old_format_are_migrated(page: Any) -> None:
    """They were all in one item."""
    old = [{"id": "1", "title": "Old", "made": 1, "messages": [{"role": "user", "content": "The mill"}]}]
    page.evaluate("(old) => { localStorage['headrace.conversations'] = JSON.stringify(old); }", old)
    page.reload()
    page.click("#conversations .title:text('Old')")
    assert page.locator(".user .body").all_inner_texts() == ["The mill"]
    assert page.evaluate("localStorage['headrace.conversations']") is None


def test_a_reload_during_an_answer_keeps_the_text_and_continues_it(chromium: Any, long_server: Running) -> None:
    for page in opened(chromium, long_server):
        page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 90_000; m.saveSettings(); })")
        send_text(page, "The mill")
        page.wait_for_selector(".assistant .body p")
        with long_server.paused():
            page.reload()
            page.wait_for_selector(".figures:has-text('interrupted')")
            before = stored_conversations(page)[0]["messages"][1]["content"]
            assert before
            page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; })")
        page.wait_for_selector("#status[data-state=ready]")
        with page.expect_request(CHAT) as caught:
            page.click(".acts button:has-text('Go on')")
        body = caught.value.post_data_json
        assert body["continue_final_message"] is True
        assert body["messages"][-1] == {"role": "assistant", "content": before}
        page.wait_for_selector(".figures:has-text('cut at the token limit')")
        after = stored_conversations(page)[0]["messages"][1]["content"]
        assert after.startswith(before)
        assert len(after) > len(before)


def test_a_truncated_answer_is_continued(page: Any, server: Running) -> None:
    send_message(page, "The mill")
    first = stored_conversations(page)[0]["messages"][1]["content"]
    page.click(".acts button:has-text('Go on')")
    page.wait_for_selector(".figures:has-text('16 tokens')")
    both = stored_conversations(page)[0]["messages"]
    assert len(both) == 2
    talk = [{"role": "user", "content": "The mill"}, {"role": "assistant", "content": first}]
    sent = {"model": "tiny", "messages": talk, "max_completion_tokens": 8, "seed": 1, "continue_final_message": True}
    assert both[1]["content"] == first + server.post("/v1/chat/completions", sent).json()["choices"][0]["message"]["content"]
    ended = sse({"role": "assistant", "content": "The end."}).replace('"finish_reason": null', '"finish_reason": "stop"')
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=ended))
    send_message(page, "stands by")
    assert answers(page)[1] == "The end."
    assert (
        page.locator(".acts button:has-text('Go on')").count() == 0
    )  # the last one ended by itself, the first is not the last


def test_enter_during_an_answer_queues_the_message_in_sight(page: Any, server: Running) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; m.settings.seed = 1; })")
    with server.paused():
        send_text(page, "The mill")
        page.wait_for_selector(".dots")
        for text in ("stands by", "a mistake", "the river"):
            send_text(page, text)
        assert page.input_value("#prompt") == ""
        assert page.locator("#queue li span").all_inner_texts() == ["stands by", "a mistake", "the river"]
        page.click("#queue li:has-text('a mistake') [title=Remove]")
        page.click("#queue li:has-text('the river') [title=Edit]")
        assert page.input_value("#prompt") == "the river"
        assert page.locator("#messages > li").count() == 2
    page.wait_for_selector("#messages > li:nth-child(4) .figures")
    assert page.locator(".user .body").all_inner_texts() == ["The mill", "stands by"]
    assert page.locator("#queue").is_hidden()


def test_queued_messages_survive_a_stop_and_a_reload(page: Any, server: Running) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; m.saveSettings(); })")
    with server.paused():
        send_text(page, "The mill")
        page.wait_for_selector(".dots")
        send_text(page, "stands by")
        page.keyboard.press("Escape")
        page.wait_for_selector("#queue:has-text('Not sent yet')")
        page.reload()
        page.wait_for_selector("#queue:has-text('Not sent yet')")
        assert page.locator("#messages > li").count() == 2
    page.wait_for_selector("#status[data-state=ready]")
    page.click("#queue button:has-text('Send')")
    page.wait_for_selector("#messages > li:nth-child(4) .figures")
    assert page.locator(".user .body").all_inner_texts() == ["The mill", "stands by"]


def test_two_conversations_are_answered_at_once(page: Any, server: Running) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; })")
    with server.paused():
        send_text(page, "The mill")
        page.wait_for_selector(".dots")
        page.keyboard.press("Alt+N")
        page.wait_for_selector("#empty h2")
        send_text(page, "A lantern")
        page.wait_for_selector(".dots")
        assert page.locator("#conversations .busy").count() == 2
        page.hover("#conversations li >> nth=0")
        page.click("#conversations .icon >> nth=0")
        page.wait_for_selector("#menu:popover-open")
        page.keyboard.press("Escape")  # closes the menu, and stops nothing
        page.wait_for_selector("#menu", state="hidden")
        assert page.locator(".dots").is_visible()
    page.wait_for_selector("#conversations:not(:has(.busy))")
    assert [len(one["messages"][1]["content"]) > 0 for one in stored_conversations(page)] == [True, True]


def test_a_prompt_that_is_too_long_offers_only_edit(page: Any) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; })")
    send_text(page, "The mill by the river. " * 200)
    page.wait_for_selector(".trouble strong:has-text('This is too long for the model')")
    assert page.locator(".trouble button").all_inner_texts() == ["Edit"]
    page.click(".trouble button")
    page.wait_for_selector(".user textarea:focus")
    page.fill(".user textarea", "The mill")
    page.press(".user textarea", "Enter")
    page.wait_for_selector(".figures:has-text('8 tokens')")
    assert page.locator(".trouble:visible").count() == 0
    assert len(stored_conversations(page)) == 1


def test_thoughts_are_folded_and_formulas_are_mathml(page: Any) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    told = "<think>\nFirst *this*.\n</think>\n\nAn area: $\\pi r^2$, and\n\n\\[\n\\sum_{i=1}^n i\n= 3\n\\]\n\nfor $5 or $6."
    for deltas in ([{"content": told}], [{"reasoning_content": "First *this*."}, {"content": told.partition("</think>")[2]}]):
        body = sse({"role": "assistant"}, *deltas)
        page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body))  # noqa: B023
        page.keyboard.press("Alt+N")
        page.wait_for_selector("#empty h2")
        send_message(page, "How large?")
        settled(page)
        assert page.locator(".thought summary").inner_text() == "Thoughts"
        assert not page.locator(".thought em").is_visible()
        assert "First" not in page.locator(".assistant > .body").inner_text()
        assert "for $5 or $6." in page.locator(".assistant > .body").inner_text()
        page.click(".thought summary")
        page.wait_for_selector(".thought em:visible")
        spaces = page.evaluate(
            "[...document.querySelectorAll('.assistant math, .assistant math *')].map((one) => one.namespaceURI)"
        )
        assert len(spaces) > 8
        assert set(spaces) == {"http://www.w3.org/1998/Math/MathML"}
        assert page.locator(".formula math[display=block] munderover").count() == 1
        assert "think" not in page.locator("#messages").inner_text()
        page.unroute(CHAT)


def test_regenerate_keeps_the_first_answer(page: Any) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; m.settings.temperature = 1; })")
    page.wait_for_selector("#status[data-state=ready]")
    send_text(page, "The mill")
    page.wait_for_selector(".figures")
    assert page.locator(".versions").count() == 0
    (first,) = answers(page)
    page.click("[title='Answer again']")
    page.wait_for_selector(".versions:has-text('2/2')")
    (second,) = answers(page)
    page.click("[title='Earlier answer']")
    page.wait_for_selector(".versions:has-text('1/2')")
    assert answers(page) == [first]
    assert page.locator("[title='Earlier answer']").is_disabled()
    page.reload()
    page.wait_for_selector(".versions:has-text('1/2')")
    page.click("[title='Later answer']")
    page.wait_for_selector(".versions:has-text('2/2')")
    assert answers(page) == [second]
    assert stored_conversations(page)[0]["messages"][1]["content"].strip() == second
    assert len(stored_conversations(page)[0]["messages"]) == 2


def test_after_a_prompt_that_is_too_long_regenerate_is_not_offered(page: Any) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; })")
    send_text(page, "The mill by the river. " * 200)
    page.wait_for_selector(".trouble strong:has-text('This is too long for the model')")
    assert page.locator("[title='Answer again']").count() == 0
    page.keyboard.press("Alt+R")
    page.wait_for_selector(".user textarea:focus")
    page.keyboard.press("Escape")
    send_text(page, "The mill")  # the message that was too long is not sent again
    page.wait_for_selector(".figures:has-text('8 tokens')")
    assert page.locator(".user .body").count() == 2


def test_the_chinese_page_shows_errors_in_chinese(chromium: Any, server: Running) -> None:
    for page in opened(chromium, server, locale="zh-CN"):
        page.wait_for_selector("#status[data-state=ready]")
        send_text(page, "The mill by the river. " * 200)
        page.wait_for_selector(".trouble p:has-text('模型的上下文最多容纳 256 个')")
        text = page.locator(".trouble:visible").inner_text()
        assert re.search(r"共需 [\d,]+ 个词元", text)
        assert not re.search(r"[A-Za-z]", text)


def test_the_dashboard_keeps_its_history_after_a_reload(page: Any, server: Running) -> None:
    page.wait_for_selector("#status[data-state=ready]")
    page.keyboard.press("Alt+D")
    page.wait_for_selector(".plot .line", state="attached")
    server.complete(max_tokens=50, extra_body={"ignore_eos": True})
    code = "import('/page/storage.js').then((m) => m.keptHistory().length)"
    page.reload()
    page.wait_for_selector("#dashboard .plot")
    assert page.evaluate(code) > 0
    page.wait_for_selector(".plot .line", state="attached")


def test_the_buttons_of_an_edit_can_be_clicked(page: Any) -> None:
    page.evaluate("import('/page/storage.js').then((m) => { m.settings.max_tokens = 8; })")
    page.wait_for_selector("#status[data-state=ready]")
    send_text(page, "The mill")
    page.wait_for_selector(".figures")
    page.press("#prompt", "ArrowUp")
    page.wait_for_selector(".user textarea:focus")
    hit = """(button) => {
      const box = button.getBoundingClientRect();
      const at = [0.1, 0.5, 0.9].map((y) => document.elementFromPoint(box.x + box.width / 2, box.y + box.height * y));
      return at.every((one) => button.contains(one));
    }"""
    assert page.locator(".user .foot .primary").evaluate(hit)
