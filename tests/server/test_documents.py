"""What the README and the documents print can be typed: every piece of Python and of TOML, every command with its options."""

import contextlib
import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer import TyperException
from typer.main import get_command

from headrace.cli.commands import MOVED, build
from headrace.cli.serve_options import read_config
from headrace.server.access.keys import read_key_file
from headrace.weights import catalog, hub
from tests.server.harness import Running
from tests.tiny_whisper import noise, write_folder, write_wav

ROOT = Path(__file__).parents[2]
# Records of what was run at the time; they may name commands that have moved since.
RECORDS = ("CHANGELOG.md", "2026-11.md")
README = (ROOT / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OF_DOCS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in PAGES
    if "docs" in page.relative_to(ROOT).parts
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


def typed() -> list[tuple[str, str]]:
    """(page, command): lines that begin with `headrace` or `$ headrace`, also behind a pipe, and code within a line."""
    found = []
    for page in PAGES:
        text = re.sub(r"\\\n *", "", page.read_text("utf-8"))
        for line in re.findall(r"^(?:    )?(?:\$ )?(?:[^`\n]*\| )?(headrace [^\n]*)", text, re.MULTILINE) + re.findall(
            r"`(headrace [^`\n]+)`", text
        ):
            found.append((page.name, line))
    return found


@cache
def whole() -> Any:
    """The command line, which takes a tenth of a second to build."""
    return get_command(build())


def parse(line: str) -> None:
    """As the command line would take it. Raises KeyError for a command, TyperException for an option that is not there."""
    line = line.removesuffix("\\")  # the command goes on in the next line
    words = shlex.split(re.split(r" {3,}", line)[0], comments=True)[1:]  # what stands further to the right explains
    words = words[: words.index("|")] if "|" in words else words
    command: Any = whole()
    while words and hasattr(command, "commands"):
        name = words.pop(0)
        if name.startswith("-") or name in ("…", "COMMAND"):
            return
        command = command.commands[name]
    context = command.make_context(command.name, [], resilient_parsing=True)  # which forgives that arguments are missing
    context.resilient_parsing = False
    command.make_parser(context).parse_args(words)


def test_every_printed_command_parses() -> None:
    lines = typed()
    assert len(lines) > 40
    wrong = []
    for page, line in lines:
        _, first, second = (*line.split(), "", "")[:3]
        if page in RECORDS and first == "bench" and second in MOVED:
            continue
        try:
            parse(line)
        except (KeyError, TyperException) as error:
            if "requires an argument" in str(error):  # an option that a sentence names
                continue
            wrong.append(f"{page}: {line}: {error}")
    assert wrong == []
    for line in ("headrace rnu MODEL", "headrace run MODEL --beems 4", "headrace bench speculat MODEL"):
        with pytest.raises((KeyError, TyperException)):
            parse(line)


@pytest.mark.weights
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_of_the_readme_runs(
    number: int, default_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def resolve(model: str, **_: object) -> Path:
        asked.append(model)
        return default_model

    monkeypatch.setattr(hub, "resolve", resolve)
    exec(compile(SNIPPETS[number], f"README.md, piece {number}", "exec"), {})
    assert asked == ["smollm2-135m"]
    printed = capsys.readouterr().out
    assert len(printed) > 50
    assert "The mill stands by" in printed


@pytest.mark.parametrize("code", OF_DOCS)
def test_a_snippet_of_the_documents_runs(
    code: str,
    tiny: Path,
    server: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "transcri" in code:  # of random weights, which may hear nothing
        monkeypatch.chdir(tmp_path)
        write_folder(tmp_path / "whisper-base")
        write_wav(tmp_path / "menu.wav", noise(3.0))
        code += "print(verbose.duration)" if "OpenAI" in code else "print(transcript)"
    with contextlib.ExitStack() as stack:
        if "client.audio" in code:
            server = stack.enter_context(Running(tmp_path / "whisper-base", model_name="whisper-base"))
        if "OpenAI" in code:  # a client of the server that the page has just started
            code = code.replace("http://127.0.0.1:8000", server.base).replace("smollm2-135m", "tiny")
        exec(compile(code.replace("smollm2-135m", str(tiny)), "a document", "exec"), {})
    assert capsys.readouterr().out


def tables(page: str) -> list[str]:
    return re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / page).read_text("utf-8"), re.DOTALL)


def test_the_settings_of_the_documents_are_settings(tmp_path: Path) -> None:
    fixed, on_demand = tables("en/use/several-models.md")
    keys, one_model = tables("en/use/serve-a-team.md")
    for secret in ("a" * 40, "b" * 40):
        keys = keys.replace('key = "…"', f'key = "{secret}"', 1)
    (tmp_path / "keys.toml").write_text(keys.replace('sha256 = "…"', f'sha256 = "{"0" * 64}"'), "utf-8")
    (tmp_path / "keys.toml").chmod(0o600)
    assert {principal.name for _, principal in read_key_file(tmp_path / "keys.toml")} == {"anna", "nightly", "prometheus"}
    for text, model in ((fixed, "smollm2-135m"), (on_demand, None), (one_model, "qwen3-0.6b")):
        (tmp_path / "serve.toml").write_text(text, "utf-8")
        context: Any = SimpleNamespace(command=whole().commands["serve"], default_map=None, meta={})
        read_config(context, tmp_path / "serve.toml")
        assert context.default_map.get("model") == model
    (table,) = tables("en/reference/models.md")
    (tmp_path / "mine.toml").write_text(table.replace('sha256 = "…"', f'sha256 = "{"0" * 64}"'), "utf-8")
    assert catalog.load([tmp_path / "mine.toml"])["my-model"].sampling == {"temperature": 0.7}
