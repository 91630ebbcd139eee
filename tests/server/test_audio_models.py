"""A chat model, a cascade and a speech model on demand behind one server; and the page with a file and the microphone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.serving import ModelSpec, is_speech, open_models, plan_bytes
from headrace.server.settings import CascadeSettings, Mode, ServerSettings
from tests.server.browser import CHROMIUM, MILLISECONDS, opened
from tests.server.harness import ENGINE, PATIENT, Running, in_thread, until
from tests.server.test_audio import noise, wav
from tests.tiny_files import write_tiny_gguf
from tests.tiny_whisper import write_folder

SETTINGS = {**ENGINE, "kv_cache_memory": "1MiB"}
FORM = {"model": "ear", "temperature": "0.3", "language": "en"}
SOUND = wav(noise(0.3))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models of texts, a cascade of them, and a speech model that is loaded for its first request."""
    folder = tmp_path_factory.mktemp("models")
    small, large = (str(write_tiny_gguf(folder / f"{seed}.gguf", seed=seed)) for seed in range(2))
    ear = str(write_folder(folder / "ear"))
    assert is_speech(ear)
    assert not is_speech(small)
    settings = ServerSettings("small", port=0, limits=PATIENT)
    chosen = [
        ModelSpec("small", small, {**SETTINGS, "max_model_len": 64}, mode=Mode.PINNED),
        ModelSpec("large", large, {**SETTINGS, "max_model_len": 64}, mode=Mode.PINNED),
        ModelSpec("ear", ear, SETTINGS, preload=False),
    ]
    size = 4 * plan_bytes(small, SETTINGS, 1 << 40).total + plan_bytes(ear, SETTINGS, 1 << 40).total
    both = CascadeSettings("both", ("small", "large"), (1.0,))
    with Running.of(open_models(chosen, settings, size, [both]), settings) as running:
        until(lambda: running.health()["status"] == "ready")
        yield running


def transcribe(server: Running, sound: bytes = SOUND, **more: str) -> Any:
    return server.http.post("/v1/audio/transcriptions", files={"file": ("a.wav", sound)}, data={**FORM, **more})


def test_chat_cascade_and_speech_are_served_together(server: Running) -> None:
    page = server.http.get("/").headers["permissions-policy"]
    assert page == "microphone=(self)", "it is known before it is loaded"
    states = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert states["ear"]["transcribes"] is True
    assert states["ear"]["state"] == "unloaded"
    assert "transcribes" not in states["small"]
    body = {"model": "both", "prompt": "a", "max_tokens": 4, "temperature": 0}
    alone = server.post("/v1/completions", body).json()["choices"]
    text = transcribe(server).json()["text"]
    answers = [in_thread(lambda: transcribe(server).json()["text"]) for _ in range(2)]
    assert server.post("/v1/completions", body).json()["choices"] == alone
    assert [one.result() for one in answers] == [text] * 2
    for name, message in (("both", "is a cascade"), ("small", "reads no sound")):
        refused = transcribe(server, model=name)
        assert refused.status_code == 400
        assert message in refused.json()["error"]["message"]


def test_a_stream_keeps_its_model_in_memory(server: Running) -> None:
    entry = server.models.entry("ear")
    form = {**FORM, "stream": "true"}
    with server.http.stream("POST", "/v1/audio/transcriptions", files={"file": ("a", wav(noise(3.0)))}, data=form) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert entry.busy
        assert any("transcript.text.done" in line for line in lines)
    until(lambda: not entry.busy)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser whose microphone plays a file."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; install it with: apt install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra `dev`)")
    path = tmp_path_factory.mktemp("microphone") / "noise.wav"
    path.write_bytes(wav(noise(2.0)))
    flags = ["--no-sandbox", "--disable-gpu", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*flags, f"--use-file-for-fake-audio-capture={path}"], timeout=MILLISECONDS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, server: Running) -> Iterator[Any]:
    yield from opened(chromium, server, permissions=["microphone"])


def written(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.querySelector('#prompt').value === text", arg=text)


def test_a_sound_file_becomes_text_of_the_message(page: Any, server: Running) -> None:
    page.wait_for_selector("#listen:not([hidden])")
    assert page.locator("#model").inner_text() == "" or "ear" not in page.locator("#models").inner_text()
    expected = transcribe(server, temperature="0", language="").json()["text"]
    page.fill("#prompt", "What is this?")
    page.set_input_files("#sound", [{"name": "a.wav", "mimeType": "audio/wav", "buffer": SOUND}])
    if expected:
        written(page, f"What is this? {expected}")
    page.wait_for_selector("#composer[aria-busy=false]")
    page.set_input_files("#sound", [{"name": "a.wav", "mimeType": "audio/wav", "buffer": b"no sound"}])
    page.wait_for_selector("text=has an unknown format")


def test_a_recording_becomes_text_of_the_message(page: Any) -> None:
    sent: list[bytes] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_buffer)
        route.fulfill(json={"text": "The mill turns."})

    page.route("**/v1/audio/transcriptions", answer)
    page.wait_for_selector("#record:not([hidden])")
    assert page.locator("#record").get_attribute("aria-label") == "Record speech"
    page.click("#record")
    page.wait_for_selector("#record[data-state=recording]")
    page.wait_for_timeout(300)
    page.click("#record")
    written(page, "The mill turns.")
    assert page.locator("#record").get_attribute("data-state") == ""
    (body,) = sent
    assert b'name="model"\r\n\r\near\r\n' in body
    assert b"\x1a\x45\xdf\xa3" in body, "a WebM file"
    page.route("**/v1/audio/transcriptions", lambda route: route.fulfill(json={"text": ""}))
    page.click("#record")
    page.wait_for_selector("#record[data-state=recording]")
    page.click("#record")
    page.wait_for_selector("text=No speech was found.")


def test_what_the_browser_records_is_decoded(page: Any) -> None:
    pytest.importorskip("av", reason="PyAV is not installed (extra `audio`)")
    from headrace.audio.decode import open_sound

    sent: list[bytes] = []

    def answer(route: Any) -> None:
        sent.append(route.request.post_data_buffer)
        route.fulfill(json={"text": "x"})

    page.route("**/v1/audio/transcriptions", answer)
    page.wait_for_selector("#record:not([hidden])")
    page.click("#record")
    page.wait_for_selector("#record[data-state=recording]")
    page.wait_for_timeout(1000)
    page.click("#record")
    written(page, "x")
    (body,) = sent
    start = body.index(b"\x1a\x45\xdf\xa3")
    (samples,) = open_sound(body[start : body.rindex(b"\r\n--")])
    assert 0.2 < len(samples) / 16_000 < 60
    assert abs(samples[:]).max() > 0.01


def test_without_a_speech_model_there_are_no_buttons(chromium: Any, tmp_path: Path) -> None:
    with Running(write_tiny_gguf(tmp_path / "tiny.gguf")) as server:
        for page in opened(chromium, server):
            page.wait_for_selector("#status[data-state=ready]")
            assert page.locator("#listen").is_hidden()
            assert page.locator("#record").is_hidden()
        assert server.http.get("/").headers["permissions-policy"] == "microphone=()"
