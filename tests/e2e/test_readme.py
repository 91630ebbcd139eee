"""Every piece of Python in the README runs, and every command it lists is there."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from headrace.cli.app import build
from headrace.weights import hub

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_commands_are_there() -> None:
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE) for name in re.findall(r"`(?:headrace )?(\w+)", row)
    }
    assert {"run", "chat", "generate", "pull", "rm"} <= named
    assert named <= set(get_command(build()).commands)  # type: ignore[attr-defined]


@pytest.mark.weights
@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_a_snippet_runs(
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
    assert ("The mill stands by" in printed) == (number == 0)
