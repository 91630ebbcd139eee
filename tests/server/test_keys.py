"""The key file: its fields, its errors, and changes while the server runs."""

import os
from pathlib import Path

import pytest

from headrace.server.access import keys
from headrace.server.access.keys import KeyRing
from headrace.server.access.principals import Principal
from headrace.server.settings import ServerSettings, SettingsError
from tests.server.harness import Running, until
from tests.server.key_principals import FILE, http, write


def read(tmp_path: Path, text: str) -> dict[str, Principal]:
    return {principal.name: principal for _, principal in keys.read_key_file(write(tmp_path / "k.toml", text))}


def test_a_file_of_keys(tmp_path: Path) -> None:
    text = """
    [a.b-c_d@e]
    """.replace("a.b-c_d@e", '"a.b-c_d@e"')
    text += 'key = ["one-of-two-keys", "the-other-of-two"]\nsalt = ""\npriority = -3\nrequests = 5\nwindow = 3600\n'
    text += '[x]\nkey = "another-good-key"\nsalt = "team"\n[y]\nkey = "yet-another-key"\nsalt = "team"\n[z]\nkey="zzzzzzzzz"'
    found = KeyRing(ServerSettings("tiny", keys=write(tmp_path / "keys.toml", text), host="0.0.0.0"))
    for key, name in (("one-of-two-keys", "a.b-c_d@e"), ("the-other-of-two", "a.b-c_d@e"), ("another-good-key", "x")):
        principal = found.of(key.encode())
        assert principal is not None
        assert principal.name == name
    assert found.of(b"one-of-two-key") is None
    assert found.needed
    first, x, y, z = (found.named(name) for name in ("a.b-c_d@e", "x", "y", "z"))
    assert first is not None
    assert x is not None
    assert y is not None
    assert z is not None
    assert (first.salt, first.priority, first.meters["requests"].most, first.meters["requests"].window) == (b"", -3, 5, 3600)
    assert x.salt == y.salt != z.salt
    assert (x.private, y.private, z.private, first.private) == (False, False, True, True)
    kept = repr([vars(found), found._owners])
    assert "one-of-two" not in kept, "what is kept of a key is its hash"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names 0"),
        ("[alice]\nkey = 'short'", "the key of alice must have 8"),
        ("[alice]\nkey = 'with a space in it'", "no spaces"),
        ("[alice]\nsalt = 'x'", "alice has no key"),
        ("[alice]\nsha256 = 'abc'", "64 hexadecimal"),
        ("[alice]\nkey = 'long-enough'\nquota = 3", "unknown field `quota`"),
        ("[alice]\nkey = 'long-enough'\nrequests = 0", "requests"),
        ("[alice]\nkey = 'long-enough'\nwindow = -1", "window"),
        ("alice = 'long-enough'", "alice"),
        ("['a b']\nkey = 'long-enough'", "the name 'a b'"),
        ("[alice]\nkey = 'long-enough'\n[bob]\nkey = 'long-enough'", "one key is there twice"),
        ("[alice", "end of a table declaration"),
    ],
)
def test_an_invalid_file_is_a_one_line_error_without_keys(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read(tmp_path, text)
    said = str(raised.value)
    assert says in said
    assert "\n" not in said
    assert not [key for key in ("short", "with a space", "long-enough") if key in said]


def test_a_file_that_all_can_read_is_refused(tmp_path: Path) -> None:
    for mode, good in ((0o600, True), (0o640, True), (0o644, False), (0o602, False)):
        file = write(tmp_path / "keys.toml", FILE, mode)
        if good:
            KeyRing(ServerSettings("tiny", keys=file))
        else:
            with pytest.raises(SettingsError, match="run chmod o-rw"):
                KeyRing(ServerSettings("tiny", keys=file))
    with pytest.raises(SettingsError, match="cannot be read"):
        KeyRing(ServerSettings("tiny", keys=tmp_path / "none.toml"))
    with pytest.raises(SettingsError, match="leave --api-key-file"):
        ServerSettings("tiny", keys=file, key="long-enough")


def test_keys_change_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new key is good and an old one is not, without a restart; a broken file changes nothing and is said once."""
    monkeypatch.setattr(keys, "LOOK", 0.01)
    file = write(tmp_path / "keys.toml", "[alice]\nkey = 'the-first-key'\nrequests = 2\nwindow = 86400")

    def status(server: Running, key: str, method: str = "GET") -> int:
        with http(server, key) as asker:
            return asker.request(method, "/v1/models" if method == "GET" else "/no/such/path").status_code

    def put(text: str, mode: int = 0o600) -> None:
        os.replace(write(tmp_path / "new", text, mode), file)

    with Running("no-model", begin=False, keys=file) as server:
        assert (status(server, "the-first-key"), status(server, "the-second-key")) == (200, 401)
        assert status(server, "the-first-key", "POST") == 404
        for text, mode in (("[alice", 0o600), ("[alice]\nkey = 'the-second-key'", 0o644)):
            caplog.clear()
            put(text, mode)
            until(lambda: "the keys that were read before stay" in caplog.text)
            assert (status(server, "the-first-key"), status(server, "the-second-key")) == (200, 401)
        file.unlink()
        until(lambda: "cannot be read" in caplog.text)
        assert status(server, "the-first-key") == 200
        put("[alice]\nkey = 'the-second-key'\nrequests = 2\nwindow = 86400")
        until(lambda: status(server, "the-second-key") == 200)
        assert status(server, "the-first-key") == 401
        assert [status(server, "the-second-key", "POST") for _ in range(2)] == [404, 429], "what was used remains used"
        assert "the-second-key" not in caplog.text
