"""A model hub on this machine, as far as `huggingface_hub` and Headrace use one, with faults to order."""

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".gguf", ".safetensors", ".bin", ".pt")  # what the hub keeps apart, with a SHA-256 as its etag


@dataclass
class HubServer:
    """`files`: repository → path → content. Faults: see the fields. `log`: (method, path, Range header) of every request."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    served_instead: dict[str, bytes] = field(default_factory=dict)  # path → other bytes than the etag promises
    break_after: list[int] = field(default_factory=list)  # each breaks one download off after that many bytes
    status: int = 0  # answer everything with this
    etag: str = ""  # instead of the right one
    ignores_ranges: bool = False
    hold_after: int = -1  # send that many bytes of a download, then wait for `release`
    release: threading.Event = field(default_factory=threading.Event)
    log: list[tuple[str, str, str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)  # credentials that came with questions about files
    tokens_elsewhere: list[str] = field(default_factory=list)  # credentials that were sent to the storage host

    def __enter__(self) -> "HubServer":
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def downloads(self) -> list[tuple[str, str]]:
        """(path, Range) of every file that was asked for in earnest, in order."""
        return [(path, range_) for method, path, range_ in self.log if method == "GET" and path.startswith("/storage/")]


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.hub.log.append((self.command, path, self.headers.get("Range", "")))
        parts = path.strip("/").split("/")
        if self.hub.status:
            self.refuse(self.hub.status)
        elif parts[0] == "storage":
            self.send_file("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self.send_info("/".join(parts[2:4]))
        else:
            self.point_to_file("/".join(parts[:2]), "/".join(parts[4:]))

    def refuse(self, status: int, code: str = "") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def known(self, repo: str) -> bool:
        if repo in self.hub.gated:
            self.refuse(401, "GatedRepo")
        elif repo not in self.hub.files:
            self.refuse(401, "RepoNotFound")
        else:
            return True
        return False

    def send_info(self, repo: str) -> None:
        if not self.known(repo):
            return
        siblings = [
            {"rfilename": path, "size": len(data), "blobId": git_id(data)}
            | ({"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}} if path.endswith(LARGE) else {})
            for path, data in self.hub.files[repo].items()
        ]
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "tags": [], "siblings": siblings}
        body = json.dumps(info).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def point_to_file(self, repo: str, path: str) -> None:
        """What the hub does for a file: say what it is, and redirect to another host where it is stored."""
        if not self.known(repo):
            return
        if path not in self.hub.files[repo]:
            self.refuse(404, "EntryNotFound")
            return
        self.hub.tokens.append(self.headers.get("Authorization", ""))
        data = self.hub.files[repo][path]
        etag = sha256(data) if path.endswith(LARGE) else git_id(data)
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.hub.port}/storage/{repo}/{path}")
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Etag", f'"{self.hub.etag or etag}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, repo: str, path: str) -> None:
        if "Authorization" in self.headers:
            self.hub.tokens_elsewhere.append(self.headers["Authorization"])
        data = self.hub.served_instead.get(path, self.hub.files[repo][path])
        start = 0
        if (wanted := self.headers.get("Range")) and not self.hub.ignores_ranges:
            start = int(wanted.removeprefix("bytes=").rstrip("-"))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        body = data[start:]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.hub.break_after:
            self.wfile.write(body[: self.hub.break_after.pop(0)])
            self.close_connection = True
            return
        if self.hub.hold_after >= 0 and not self.hub.release.is_set():
            self.wfile.write(body[: self.hub.hold_after])
            self.wfile.flush()
            self.hub.release.wait()
            body = body[self.hub.hold_after :]
        self.wfile.write(body)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
