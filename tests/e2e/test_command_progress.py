"""Commands show progress from their first moment, and clear it at the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.data.progress import SPINNER, Moving
from headrace.llm import LLM
from tests.cli_shell import ERASE, Shell, Terminal, environment, screen

GREEDY = ("-t", "0")


def stages(seen: str) -> list[str]:
    """What the line on stderr said, one after the other: the first words of what it is at."""
    shown = [part.split("\r")[0].split("\n")[0].partition(",")[0] for part in seen.split(ERASE)[1:]]
    words = [one.split()[1:3] if one[0] in SPINNER else one.split()[:1] for one in shown if one]
    return list(dict.fromkeys(map(" ".join, words)))


def test_a_terminal_shows_every_stage_before_the_answer(tiny_gguf: Path) -> None:
    with Terminal("run", tiny_gguf, "The mill", "-m", "20", *GREEDY) as terminal:
        assert terminal.exit_code() == 0
    found = stages(terminal.seen)
    words = [one.split()[0] for one in found]
    assert words[0] == "starting"
    assert words.index("loading") <= 2  # what is said between is the settings in force
    assert "reading the" in found
    assert not any(word in line for line in screen(terminal.seen) for word in ("starting", "loading", "reading the"))


def test_progress_starts_before_slow_imports(tiny_gguf: Path) -> None:
    """Python alone is between the person and it."""
    look = (
        "import sys; from headrace.data import progress; start = progress.Moving.start\n"
        "def first(self, *args, **more):\n"
        "    print(*sys.modules); sys.exit(0)\n"
        "progress.Moving.start = first; progress.for_stream = lambda: progress.Moving(sys.stderr)\n"
        "from headrace.cli.app import main; main(['run', 'x'])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env=environment())
    loaded = set(done.stdout.split())
    assert "headrace.cli.app" in loaded
    assert loaded & {"typer", "numpy", "torch", "msgspec", "rich.console", "jinja2", "headrace.cli.run"} == set()


def test_a_pipe_gets_one_plain_line_at_the_start(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the mill stands by the river " * 40)
    for command in (
        ("run", tiny_gguf, "a", "-m", "1"),
        ("embed", tiny_gguf, "a"),
        ("perplexity", tiny_gguf, tmp_path / "text"),
    ):
        code, out, err = shell(*command)
        assert code == 0
        assert f"loading {tiny_gguf.name}" in err.splitlines()[:2]  # after the settings in force, where there are any
        assert sum("loading" in line for line in err.splitlines()) == 1
        assert "\x1b" not in out + err
    assert shell("run", tiny_gguf, "a", "-m", "1", "--quiet")[2] == ""


def test_quiet_shows_no_progress(tiny_gguf: Path) -> None:
    """The control of the above: nothing moves."""
    with Terminal("run", "--quiet", tiny_gguf, "The mill", "-m", "3", *GREEDY) as terminal:
        assert terminal.exit_code() == 0
    assert ERASE not in terminal.seen


def test_an_answer_on_a_terminal_breaks_between_words(tiny_gguf: Path) -> None:
    with Terminal("run", "-q", tiny_gguf, "The mill", "-m", "60", *GREEDY, columns=30) as terminal:
        assert terminal.exit_code() == 0
    with Terminal("run", "-q", tiny_gguf, "The mill", "-m", "60", *GREEDY, columns=3000) as wide:
        assert wide.exit_code() == 0
    words = wide.seen.split()
    assert len(words) > 5
    assert terminal.seen.split() == words, "no word is cut in two"
    assert terminal.seen.count("\n") > wide.seen.count("\n")


def test_many_prompts_have_a_bar_on_a_terminal(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt has none, and what was said is true: as many are counted as there are."""
    told: list[tuple[str, int]] = []

    class Told(Moving):
        def __init__(self) -> None:
            super().__init__(sys.stderr)

        def start(self, what: str, total: int | None = None, done: int = 0, unit: str = "B") -> None:
            told.append((f"{what} {unit}", total or 0))

        def advance(self, count: int, remark: str = "") -> None:
            told.append(("", count))

    monkeypatch.setattr(tiny_llm, "progress", Told())
    tiny_llm.generate("one")
    assert told == []
    tiny_llm.generate(["one", "two", "three"])
    assert told[0] == ("generating prompts", 3)
    assert sum(count for name, count in told if not name) == 3
    told.clear()
    tiny_llm.score(["one", "two"])
    assert told == []


def test_an_embedding_of_many_texts_shows_progress(tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("the mill\n" * 130)
    (tmp_path / "out").touch()
    code = f"import sys; sys.stdout = open({str(tmp_path / 'out')!r}, 'w')\n"
    with Terminal("embed", tiny_gguf, "--file", tmp_path / "texts", before=code) as terminal:
        assert terminal.exit_code() == 0
    assert "of 130 texts" in terminal.seen
    assert len([json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]) == 130
    assert "of 130 texts" not in "".join(screen(terminal.seen))
