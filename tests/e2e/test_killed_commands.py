"""`headrace compress` and `train-classifier --joint`, killed with SIGKILL at every stage and started again: same bytes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_train_joint import write_pairs
from tests.killed import Commands
from tests.models.test_compress_encoder import write_lines
from tests.tiny_bert import write_tiny_bert
from tests.tiny_files import Sizes, write_tiny_gguf

# Command and OUT. MODEL and BERT are tiny models, the other capitals their texts.
CASES = {
    "cut, scaled and rounded, GGUF": (
        "compress MODEL -f q4_0 --method neurons,awq,gptq --keep-neurons 0.5 --calibrate TEXT --tokens 256 --judge LATER",
        "out.gguf",
    ),
    "pruned in rounds, healed and rounded, GGUF": (
        "compress MODEL -f q4_0 --method heal,magnitude,gptq --sparsity 0.5 --prune-rounds 2 --heal-steps 4"
        " --calibrate TEXT --tokens 256",
        "out.gguf",
    ),
    "2:4, folder": (
        "compress MODEL -f int4-g32-sym --method sparsegpt --sparsity 2:4 --calibrate TEXT --tokens 256",
        "out",
    ),
    "encoder, folder": (
        "compress BERT -f int4-g32 --method gptq --calibrate LINES --tokens 512 --judge OTHER",
        "out",
    ),
    "encoder trained with its exits": (
        "train-classifier BERT -d PAIRS --joint --epochs 1 --batch 16 --delta 0.4",
        "out",
    ),
    "to nearest, GGUF": ("compress MODEL -f q8_0", "out.gguf"),
    "to nearest, folder": ("compress MODEL -f int8", "out"),
}
# Mark a finished layer, cut or training. Written once over all processes: a killed command continues after them.
KEPT = ("state.json", "0-neurons.json", "heal.json")
# Stages whose files the short test does not end at: rows between layers, and settings in the unfinished folder.
BETWEEN = ("rows.a", "rows.b", "tokenizer_config.json", "headrace.json")

Ask = Callable[..., list[str]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("inputs")
    for name, first in (("text.txt", 0), ("later.txt", 10_000)):
        (folder / name).write_text(" ".join(f"{number}" for number in range(first, first + 700)))
    return {
        "MODEL": write_tiny_gguf(folder / "tiny.gguf", sizes=Sizes(ffn=128)),
        "BERT": write_tiny_bert(folder / "bert"),
        "TEXT": folder / "text.txt",
        "LATER": folder / "later.txt",
        "LINES": write_lines(folder / "lines.txt", 1),
        "OTHER": write_lines(folder / "other.txt", 2),
        "PAIRS": write_pairs(folder / "pairs.jsonl", 48, 1),
    }


def asked(case: str, inputs: dict[str, Path], root: Path) -> tuple[Ask, Path]:
    """The command of a case with its OUT below `root`, and OUT."""
    command, name = CASES[case]
    root.mkdir()
    words = [inputs.get(word, word) for word in command.split()]
    run = Commands(root)
    return lambda **kill: run(*words, "-o", root / name, "--threads", 1, **kill), root / name


def content(out: Path) -> dict[str, object]:
    """Bytes of OUT's files, and the report without its times."""
    paths = [out] if out.is_file() else [path for path in sorted(out.iterdir()) if path.is_file()]
    files: dict[str, object] = {path.name: path.read_bytes() for path in paths}
    if (report := out.with_name(f"{out.name}.report.json")).exists():
        files["report"] = timeless(json.loads(report.read_text()))
    return files


def timeless(value: Any) -> Any:
    """A report without its times."""
    if isinstance(value, dict):
        return {key: timeless(each) for key, each in value.items() if key != "seconds"}
    return [*map(timeless, value)] if isinstance(value, list) else value


def tree(out: Path) -> set[str]:
    """All files and folders of a command."""
    return {path.relative_to(out.parent).as_posix() for path in out.parent.rglob("*")}


def compare(case: str, inputs: dict[str, Path], folder: Path, short: bool) -> None:
    """Kill the command after each rename of an uninterrupted run, one after the other, and compare the results.

    short: only at the last rename to each file; otherwise also before each first rename, with the unfinished file on disk.
    """
    ask, whole = asked(case, inputs, folder / "whole")
    *stages, last = ask()
    ask, out = asked(case, inputs, folder / "out")
    made: list[str] = []
    for at, stage in enumerate(stages):
        if short and (Path(stage).name in BETWEEN or stage in stages[at + 1 :]):
            continue
        if not short and stage not in stages[:at]:
            made += ask(before=stage)
        made += ask(after=stage)
    made += ask(before=last)
    made += ask()
    assert content(out) == content(whole)
    assert tree(out) == tree(whole), "a finished command removes its unfinished files"
    for name, count in Counter([*stages, last]).items():
        if Path(name).name in KEPT:
            assert Counter(made)[name] == count, f"{name} was written again"


@pytest.mark.parametrize("case", CASES)
def test_a_command_killed_at_every_stage_writes_the_same(case: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    """Finished layers, cuts and steps of trainings are not computed again; a rounding to nearest begins again."""
    compare(case, inputs, tmp_path, short=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_command_killed_around_every_rename_writes_the_same(case: str, inputs: dict[str, Path], tmp_path: Path) -> None:
    """The same before and after each file of an uninterrupted run gets its name."""
    compare(case, inputs, tmp_path, short=False)
