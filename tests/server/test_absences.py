"""Attacks that are impossible because the code for them does not exist. Each search finds a planted example."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.protocols.fields import ChatRequest, CompletionRequest, EmbeddingRequest, ResponseRequest
from tests.server.harness import ROOT, Running

SERVER = ROOT / "src/headrace/server"
SOURCES = {path.relative_to(SERVER).as_posix(): path.read_text("utf-8") for path in sorted(SERVER.rglob("*.py"))}
CLIENTS = {
    "httpx",
    "httpx2",
    "requests",
    "urllib3",
    "aiohttp",
    "http.client",
    "urllib.request",
    "ftplib",
    "smtplib",
    "websockets",
}
# Where the file system is touched at all: the database's folder, the page's own files, a model's size before it is loaded,
# the files of keys. None of these paths comes from a request.
FILES = {"storage/store.py", "access/keys.py", "page/routes.py", "serving.py", "ray_serve.py"}
CODE = {"eval", "exec", "compile", "__import__", "import_module", "run_path", "run_module"}
SHELL = {"system", "popen", "call", "check_output", "check_call", "create_subprocess_shell"}


def imported(source: str) -> set[str]:
    tree = ast.parse(source)
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


def called(source: str) -> Iterator[str]:
    """The last names of everything that is called."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def clients(source: str) -> set[str]:
    return {name for name in imported(source) if name in CLIENTS or name.split(".")[0] in CLIENTS}


def file_calls(source: str) -> set[str]:
    names = {"open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rmtree", "mkdir", "iterdir", "glob"}
    return names & set(called(source))


def code_calls(source: str) -> set[str]:
    tree = ast.walk(ast.parse(source))
    plain = {node.func.id for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (CODE & plain) | ((SHELL | {"import_module"}) & set(called(source)))


def test_the_server_imports_no_http_client() -> None:
    """No request can make it fetch anything (SSRF): there is nothing to fetch with."""
    assert {name: clients(source) for name, source in SOURCES.items() if clients(source)} == {}
    assert clients("import urllib.request\nfrom httpx import get") == {"urllib.request", "httpx"}


def test_requests_name_no_files() -> None:
    """No path of a client is opened (traversal): only modules that hear no request touch the file system."""
    assert {name for name, source in SOURCES.items() if file_calls(source)} <= FILES
    assert file_calls("def upload(name):\n    open(name).read()") == {"open"}


def test_nothing_of_a_request_becomes_code() -> None:
    found = {name: code_calls(source) for name, source in SOURCES.items()}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert code_calls("eval(body)\nos.system(x)") == {"eval", "system"}


def test_statements_to_the_database_are_constant() -> None:
    """What a client sends is a parameter of a statement, never a part of it: braces in one hold names of this code."""
    allowed = set("COLUMNS SCHEMA RESPONSES VERSION where which direction beyond ended oldest biggest share".split())
    allowed |= set("stamp counts column columns table names places query".split())
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr) and is_statement(node):
                used = {ast.unparse(part.value) for part in node.values if isinstance(part, ast.FormattedValue)}
                assert used <= allowed, f"{name}:{node.lineno} puts {used - allowed} into a statement"
    (planted,) = [n for n in ast.walk(ast.parse("f'DELETE FROM files WHERE id = {name}'")) if isinstance(n, ast.JoinedStr)]
    assert is_statement(planted)


def is_statement(node: ast.JoinedStr) -> bool:
    text = "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant)).strip()
    return text.startswith(("SELECT", "INSERT", "UPDATE", "DELETE", "BEGIN"))


@pytest.mark.parametrize("field", ["prompt_embeds", "lora_path", "logits_processors", "chat_template", "images", "model_path"])
def test_no_request_brings_tensors_adapters_templates_or_code(server: Running, field: str) -> None:
    for kind in (ChatRequest, CompletionRequest, EmbeddingRequest, ResponseRequest):
        assert field not in kind.__struct_fields__
    body = {"model": "tiny", "prompt": "a", field: "AAAA"}
    answer = server.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_field")


def test_there_are_no_admin_routes(server: Running) -> None:
    """Nothing brings weights, runs code, pauses or stops the server over HTTP. Operators load and unload listed models."""
    paths = set(server.http.get("/openapi.json").json()["paths"])
    words = ("update", "load", "admin", "pause", "reset", "exec", "lora")
    assert {path for path in paths for word in words if word in path} == {"/models/load", "/models/unload"}
    for path in ("/update_weights", "/pause", "/load_lora_adapter", "/invocations", "/shutdown", "/v1/load_lora_adapter"):
        assert server.post(path, {}).status_code == 404


def test_ids_are_only_compared(server: Running) -> None:
    for name in ("..%2f..%2fetc%2fpasswd", "' OR 1=1 --", "%00", "a" * 5000):
        for place in ("/v1/files/", "/v1/batches/", "/v1/responses/"):
            assert server.http.get(place + name).status_code in (400, 404)


def test_the_folder_of_the_state_is_private(tmp_path: Path) -> None:
    with Running("no-model", begin=False, state=tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def patterns(source: str) -> list[str]:
    """Every regular expression that a module uses."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    uses = [call for call in calls if isinstance(call.func, ast.Attribute) and getattr(call.func.value, "id", "") == "re"]
    return [ast.literal_eval(call.args[0]) for call in uses if isinstance(call.args[0], ast.Constant)]


def nested(items: Iterable[Any], inside: bool = False) -> bool:
    """Whether something repeated without bound holds something repeated without bound, which is how matching explodes."""
    for kind, value in items:
        unbounded = str(kind) in ("MAX_REPEAT", "MIN_REPEAT") and value[1] > 1000
        if unbounded and inside:
            return True
        parts = value if isinstance(value, tuple | list) else (value,)
        for part in parts:
            inner = part if isinstance(part, list) else [part]
            for one in inner:
                if hasattr(one, "data") and nested(one.data, inside or unbounded):
                    return True
    return False


def test_no_regular_expression_can_explode() -> None:
    found = [pattern for source in SOURCES.values() for pattern in patterns(source)]
    assert len(found) >= 4
    assert [pattern for pattern in found if nested(re._parser.parse(pattern).data)] == []  # type: ignore[attr-defined]
    for explosive in ("(a+)+b", "(?:a|b*)*c", r"(\s*x\s*)*$"):
        assert nested(re._parser.parse(explosive).data), explosive  # type: ignore[attr-defined]
