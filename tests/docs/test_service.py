"""The files of the page on serving a team: systemd accepts its unit, nginx its server block."""

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.docs.markdown import DOCS, read

PAGES = ("en/use/serve-a-team.md", "zh/use/serve-a-team.md")


def block(page: str, begin: str) -> str:
    """The fenced block of a page that begins with this text."""
    (found,) = [text for _, text in read(DOCS / page).blocks if text.startswith(begin)]
    return found


def program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/sbin:/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def verify_unit(text: str, folder: Path) -> str:
    """Errors of a unit; its program, which is not installed here, is replaced."""
    (folder / "headrace.service").write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", text))
    command = [program("systemd-analyze"), "verify", folder / "headrace.service"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode or "headrace.service" in done.stderr else ""


@pytest.mark.parametrize("page", PAGES)
def test_systemd_accepts_the_unit(page: str, tmp_path: Path) -> None:
    unit = block(page, "[Unit]")
    assert verify_unit(unit, tmp_path) == ""
    assert "Unknown key" in verify_unit(unit.replace("KillMode", "KilMode"), tmp_path)


def verify_server(text: str, folder: Path) -> str:
    """Errors of a server block, with a certificate made now and a free port."""
    command = [program("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=llm.example.org", "-keyout", folder / "llm.key", "-out", folder / "llm.pem"]
    subprocess.run([*command, *names], capture_output=True, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = text.replace("/etc/ssl/", f"{folder}/").replace("listen 443", f"listen 127.0.0.1:{port}")
    paths = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(f"pid {folder}/pid; events {{}} http {{ access_log off; {paths} {text} }}")
    command = [program("nginx"), "-t", "-q", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "errors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("page", PAGES)
def test_nginx_accepts_the_server_block(page: str, tmp_path: Path) -> None:
    server = block(page, "server {")
    assert verify_server(server, tmp_path) == ""
    assert "unknown directive" in verify_server(server.replace("proxy_buffering", "proxy_bufering"), tmp_path)
