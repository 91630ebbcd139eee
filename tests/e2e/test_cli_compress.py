"""The commands compress and arithmetic."""

import json
import os
import signal
from pathlib import Path

import pytest

from headrace.cli.options import writable, writable_output
from tests.cli_shell import SECONDS, Shell
from tests.killed import killed_at
from tests.tiny_files import Sizes, write_tiny_gguf


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_model_is_written_and_inspected(shell: Shell, tmp_path: Path) -> None:
    model, out = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    code, said, err = shell("compress", model, "-o", out, "-f", "q8_0", "--matrices")
    assert code == 0
    assert "error:           0.00" in said
    assert "blk.0.attn_q.weight\tQ8_0\t1088\t" in said
    assert "out.gguf: 100 %" in err
    code, said, _ = shell("inspect", out, "--json")
    found = json.loads(said)
    assert (code, found["types"]["Q8_0"]) == (0, 14)
    assert 8.5 < found["bits"] < 9.5
    code, said, _ = shell("inspect", out)
    assert f"{found['bits']:.2f} bits each" in said


def test_methods_that_read_texts(shell: Shell, tmp_path: Path) -> None:
    """A line a layer, figures at the end, a report beside the file, importance that rtn can use."""
    model, out, text = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.gguf", tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(1500)))
    arguments = ("compress", model, "-o", out, "-f", "q4_0", "--method", "awq,gptq", "--calibrate", text, "--tokens", 1024)
    code, said, _ = shell(*arguments, "--dry-run")
    assert (code, out.exists()) == (0, False)
    assert "at most, without the mapped model file and the program itself" in said
    code, said, err = shell(*arguments, "--judge", "self", "--write-imatrix", tmp_path / "i.gguf")
    assert code == 0
    assert "2/2 qkv.q K 32 error 0." in err
    assert "of the squares of the layers' outputs" in said
    assert "judged:          KL " in said
    assert json.loads((tmp_path / "out.gguf.report.json").read_text())["tokens"] == 1024
    code, said, _ = shell("inspect", out, "--json")
    assert (code, json.loads(said)["types"]["Q4_0"]) == (0, 13)
    assert shell("compress", model, "-o", tmp_path / "two.gguf", "-f", "q4_0", "--imatrix", tmp_path / "i.gguf")[0] == 0


@pytest.mark.parametrize(("name", "number_format"), [("out.gguf", "Q4_0"), ("out", "int4-g32")])
def test_a_run_killed_during_evaluation_resumes(shell: Shell, tmp_path: Path, name: str, number_format: str) -> None:
    """OUT exists and is whole at that moment, also as a folder; another command still refuses to replace it."""
    model, out, text = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / name, tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(1500)))
    # Tests see one core, the killed process all: the same number of threads for both.
    method = ("--method", "gptq", "--calibrate", text, "--tokens", 1024, "--threads", 1)
    start = ("compress", model, "-o", out, "-f", number_format, *method)
    kill = """
import os, signal
from headrace.compress import write
write.judge = lambda *texts: os.kill(os.getpid(), signal.SIGKILL)
"""
    process = shell.start(*start, "--judge", "self", before=kill)
    process.communicate(timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL
    assert out.exists()
    assert "exists; give another name" in shell("compress", model, "-o", out, "-f", number_format)[2]
    code, said, err = shell(*start, "--judge", "self")
    assert code == 0, err
    assert "judged:          KL " in said
    assert not out.with_name(f"{name}.work").exists()
    assert "exists; give another name" in shell(*start, "--judge", "self")[2]


def test_a_command_killed_at_every_stage_continues(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut, scales, rounding, OUT, and the report: killed at the first file of each name, one after the other, the same
    command continues to the same bytes."""
    model, text = write_tiny_gguf(tmp_path / "tiny.gguf", sizes=Sizes(ffn=128)), tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(700)))
    names: list[str] = []
    right = os.replace

    def replace(old: Path, new: Path) -> None:
        names.append(Path(new).name)
        right(old, new)

    def ask(folder: str) -> tuple[int, str, str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        more = ("--keep-neurons", "0.5", "--calibrate", text, "--tokens", 256, "--judge", "self", "--threads", 1)
        out = tmp_path / folder / "out.gguf"
        return shell("compress", model, "-o", out, "-f", "q4_0", "--method", "neurons,awq,gptq", *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        code, _, err = ask("whole")
    assert code == 0, err
    stages = list(dict.fromkeys(names))
    assert {"texts.json", "0-neurons.gguf", "state.json", "out.gguf", "out.gguf.report.json"} <= set(stages)
    for name in stages:
        killed_at(name, 1, lambda: ask("again"))
    code, _, err = ask("again")
    assert code == 0, err
    made, whole = (tmp_path / folder / "out.gguf" for folder in ("again", "whole"))
    assert made.read_bytes() == whole.read_bytes()
    reports = [json.loads(out.with_name("out.gguf.report.json").read_text()) for out in (made, whole)]
    assert reports[0]["judged"] == reports[1]["judged"]
    assert not made.with_name("out.gguf.work").exists()


def test_an_out_that_exists_is_not_replaced(shell: Shell, tmp_path: Path) -> None:
    model, folder, named = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out", tmp_path / "folder.gguf"
    folder.mkdir()
    named.mkdir()
    for out, more in ((folder, ()), (folder, ("--overwrite",)), (named, ()), (named, ("--overwrite",))):
        code, _, err = shell("compress", model, "-o", out, "-f", "int4-g32" if out == folder else "Q4_0", *more)
        assert (code, err) == (1, f"headrace: {out} exists; give another name\n")


def test_looking_at_an_output_creates_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command killed at that moment leaves no empty OUT, which the next command would refuse as existing."""
    seen = []
    monkeypatch.setattr("os.open", lambda path, *rest, right=os.open: (seen.append(str(path)), right(path, *rest))[1])
    for look in (writable, writable_output):
        assert look(tmp_path / "out.gguf") == tmp_path / "out.gguf"
    assert str(tmp_path / "out.gguf") not in seen
    assert list(tmp_path.iterdir()) == []


def test_judging_on_the_file_measured_on_is_warned_of(shell: Shell, tmp_path: Path) -> None:
    model, text = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(40_000)))
    other = tmp_path / "other.txt"
    other.write_text(" ".join(f"{number}" for number in range(90_000, 50_000, -1)))
    start = ("compress", model, "-f", "Q4_0", "--method", "gptq", "--calibrate", text, "--tokens", 1024)
    for judge, warned in ((text, True), (other, False)):
        out = tmp_path / f"{judge.stem}.gguf"
        code, _, err = shell(*start, "-o", out, "--judge", judge)
        assert code == 0, err
        assert (f"--judge {judge} is the file of --calibrate" in err) == warned
        report = json.loads((tmp_path / f"{out.name}.report.json").read_text())
        assert any("judge on another file" in line for line in report["warnings"]) == warned


def test_structured_cuts_shrink_a_model(shell: Shell, tmp_path: Path) -> None:
    """What went is told, and the file's numbers are those of a smaller model."""
    model, out, text = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.gguf", tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(1500)))
    cuts = ("--method", "neurons,kv-heads,layers", "--keep-neurons", 0.5, "--kv-heads", 1, "--drop-layers", 1)
    code, said, err = shell("compress", model, "-o", out, "-f", "F16", *cuts, "--calibrate", text, "--tokens", 512)
    assert code == 0, err
    assert "2/2 error 0." in err
    assert "neurons:         32 of 48, " in said
    assert "kv-heads:        1 of 2, " in said
    assert "layers:          1 of 2, without " in said
    code, said, _ = shell("inspect", out, "--json")
    assert code == 0
    assert len(json.loads((tmp_path / "out.gguf.report.json").read_text())["cuts"]) == 3


def test_a_dry_run_prints_the_bytes_and_writes_nothing(shell: Shell, tmp_path: Path) -> None:
    model, out = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    code, said, err = shell("compress", model, "--dry-run", "-f", "Q4_K_M", "--json")
    predicted = json.loads(said)
    assert (code, list(tmp_path.glob("*.gguf"))) == (0, [model])
    assert predicted["error"] is None
    assert "rows of 32, 48 values are not a multiple of 256, which K-quants need" in err
    shell("compress", model, "-o", out, "-f", "Q4_K_M")
    assert out.stat().st_size == predicted["bytes"]
    given = ("compress", model, "-f", "Q8_0", "--kv", "int4", "--tokens", 256, "-o", tmp_path / "kv.gguf")
    smaller = ("--method", "kv-heads,rtn", "--kv-heads", 1)
    for more, size in (((), 112), (smaller, 56)):  # of 2 layers with 2 heads and 8 dimensions
        code, said, _ = shell(*given, *more, "--dry-run")
        assert code == 0
        assert f"K and V:         {size} bytes a token in int4, {size / 128:.0%} of 128 in bfloat16" in said
    predicted = json.loads(shell(*given, *smaller, "--dry-run", "--json")[1])
    assert predicted["kv"] == {"format": "int4", "bytes": 56, "before": 128}
    written = json.loads(shell(*given, *smaller, "--json")[1])
    assert (written["kv"], written["bytes"]) == (predicted["kv"], (tmp_path / "kv.gguf").stat().st_size)
    assert predicted["bytes"] == written["bytes"]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("-o", "OUT"), 1, "OUT exists; give another name, or --overwrite"),
        ((), 2, "give a file to write with -o OUT.gguf, or --dry-run"),
        (("--dry-run", "-f", "Q4"), 1, "unknown format 'Q4'"),
        (("--dry-run", "--method", "gptq,awq"), 1, "gptq,awq cannot be: awq scales what is neither scaled nor rounded yet"),
        (("--dry-run", "--method", "gptq", "--tokens", "many"), 2, "--tokens is a number or auto, not many"),
        (("--dry-run", "--method", "gptq", "--budget", "much"), 1, "'much' is not a size"),
        (
            ("--dry-run", "--method", "gptq,neurons"),
            1,
            "gptq,neurons cannot be: neurons makes matrices smaller before they change",
        ),
        (("--dry-run", "--kv-heads", "1"), 1, "--kv-heads needs the method kv-heads: --method kv-heads"),
        (("--dry-run", "--imatrix", "OUT"), 1, "it is not an importance matrix, or it is damaged"),
    ],
)
def test_invalid_arguments_are_a_one_line_error(
    shell: Shell, tmp_path: Path, arguments: tuple[str, ...], code: int, line: str
) -> None:
    model, out = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out.gguf"
    out.write_bytes(b"\xff" * 64)
    found, said, err = shell("compress", model, *(str(out) if one == "OUT" else one for one in arguments))
    assert (found, said) == (code, "")
    assert line.replace("OUT ", f"{out} ") in err
    assert err.count("\n") == 1


def test_arithmetic_prints_the_cost_of_a_token(shell: Shell, tmp_path: Path) -> None:
    """2 layers of 2 heads of 8, stored as 16: 256 bytes of K and V in 16 bits; the table of tokens is not read."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    arguments = ("arithmetic", model, "-f", "Q8_0", "-f", "int4-g16", "--context", 100, "--batch", 2, "--bandwidth", 1)
    code, said, _ = shell(*arguments, "--speed", 0.001, "--json")
    now, eight, grid = json.loads(said)
    assert (code, now["kv_bytes"], now["operations"] % 2) == (0, 256, 0)
    assert eight["step_bytes"] == eight["read_bytes"] + 2 * 100 * 256
    assert eight["tokens_per_s_at_most"] == pytest.approx(2 / max(eight["step_bytes"] / 1e9, 2 * eight["operations"] / 1e9))
    assert eight["critical_batch"] == pytest.approx(eight["read_bytes"] / eight["operations"])
    assert grid["error"]["sqnr"] < 30 < 40 < eight["error"]["sqnr"]
    code, said, err = shell(*arguments)
    table = [line.split("\t") for line in said.splitlines()]
    assert [row[0] for row in table] == ["FORMAT", "unchanged", "Q8_0", "int4-g16"]
    assert "256 bytes of K and V" in err
