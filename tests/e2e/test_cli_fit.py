"""`headrace fit` as people run it: answers from headers alone, and refusals of one line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import core
from headrace.bench import calibrate
from headrace.startup.fit import machine as machines
from headrace.weights import catalog
from tests.cli_shell import SECONDS, Shell
from tests.tiny_files import write_tiny_gguf
from tests.unit.test_fit_sizes import DEEPSEEK_V3, LLAMA2_7B
from tests.unit.test_fit_times import MEASURED

pytestmark = pytest.mark.skipif(not core.available(), reason="the packed sizes are the core's")

WITHOUT_TORCH = "sys.modules['torch'] = None  # its import raises ImportError"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA2_7B))
    return path


def answer(shell: Shell, *arguments: object) -> dict[str, Any]:
    code, out, err = shell("fit", *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_memory_without_a_machine(shell: Shell, config: Path, tiny_gguf: Path) -> None:
    found = answer(shell, config, "--context", 4096, "--batch", 2, "--memory", "24GiB")
    assert found["memory"]["kv"] == 2 * 4096 * 524288
    assert found["memory"]["fits"]
    assert "machine" not in found
    assert "cells" not in found
    code, out, _ = shell("fit", tiny_gguf)
    assert code == 0
    assert "no times: measure this machine with --calibrate, or name one with --machine" in out
    assert answer(shell, tiny_gguf)["memory"]["weights"] > 0


def test_a_model_that_is_not_downloaded(shell: Shell) -> None:
    """The catalog has its sizes; `run` would download it."""
    found = answer(shell, "qwen3-0.6b", "--machine", "h100")
    assert found["model"]["origin"] == "the catalog; the model is not downloaded"
    assert found["model"]["kv_bytes_per_token"] == 28 * 8 * 128 * 2 * 2
    assert found["memory"]["weights"] == pytest.approx(639446688, rel=0.02)


def test_memory_nodes_are_predicted(shell: Shell, config: Path) -> None:
    one, two = (answer(shell, config, "--machine", "xeon-8592", "--nodes", count) for count in (1, 2))
    assert two["machine"]["bandwidth"] == 2 * one["machine"]["bandwidth"]
    assert two["memory"]["available"] == 2 * one["memory"]["available"]
    assert one["predicted"]["tpot_ms"] / 2 < two["predicted"]["tpot_ms"] < one["predicted"]["tpot_ms"]
    assert two["phases"]["decode"]["by_operation"]["barriers"]["ms"] == pytest.approx(32 * 0.012)


def test_the_nodes_of_a_measured_machine_have_its_free_memory_each(
    shell: Shell, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.save(MEASURED)
    monkeypatch.setattr("headrace.host.free_memory", lambda: 5_000_000_000)
    for count in (1, 2):
        assert answer(shell, config, "--nodes", count)["memory"]["available"] == count * 5_000_000_000


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (("--machine", "h100", "--nodes", 2), "--nodes 2: a host of NVIDIA H100 80 GB SXM has one memory node; lower it"),
        (("--nodes", 2), "--nodes 2 needs times of one node; measure this machine with --calibrate, or use --machine"),
        (
            ("--machine", "xeon-8592", "--nodes", 2, "--check"),
            "--check runs the model on this machine, and --nodes 2 is predicted; leave one of them out",
        ),
    ],
)
def test_memory_nodes_that_cannot_be_predicted(shell: Shell, config: Path, options: tuple[object, ...], refusal: str) -> None:
    code, _, err = shell("fit", config, *options)
    assert (code, err.strip()) == (1, f"headrace: {refusal}")


def test_times_of_a_published_machine_are_marked(shell: Shell, config: Path) -> None:
    code, out, _ = shell("fit", config, "--machine", "a100", "--devices", 2, "--tpot", 20, "--ttft", 1000)
    assert code == 0
    assert "published, not measured here" in out
    assert "a token:" in out
    assert "(predicted)" in out
    for head in ("MS (PREDICTED)", "TOKENS/S (PREDICTED)", "MS (MEASURED)"):
        assert head in out
    found = answer(shell, config, "--machine", "a100", "--devices", 2)
    assert all(set(cell) == {"predicted", "measured", "error"} for cell in found["cells"].values())
    assert {cell["measured"] for cell in found["cells"].values()} == {None}


def test_ranks_and_a_plot(shell: Shell, config: Path, tmp_path: Path) -> None:
    found = answer(shell, config, "--tp", 4, "--machine", "a100", "--plot", tmp_path / "roof.svg")
    assert [each["rank"] for each in found["memory"]["ranks"]] == [0, 1, 2, 3]
    drawn = (tmp_path / "roof.svg").read_text()
    assert drawn.startswith("<svg")
    assert "published, not measured here" in drawn
    assert "(predicted)" in drawn


def test_an_architecture_that_is_not_run(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "deepseek.json"
    path.write_text(json.dumps(DEEPSEEK_V3))
    found = answer(shell, path, "--machine", "lpu")
    assert found["model"]["kv_bytes_per_token"] == 70272
    assert "256 experts" in found["model"]["refusal"]
    code, _, err = shell("fit", path, "--check", "--machine", "a100")
    assert code == 1
    assert "--check runs the model" in err


def test_a_machine_of_this_test_predicts_and_checks(shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured cells stand next to predicted ones, with the error. A tiny model's context ends most cells."""
    machines.save(MEASURED)
    long = Path(shell.folder, "long.gguf")
    write_tiny_gguf(long, context=1024)
    found = answer(shell, long, "--check", "--cells", "b1,b4", "--context", 512)
    assert found["machine"]["label"] == "measured today"
    assert set(found["cells"]) == {"pp512", "b1", "b4", "b8", "b16", "b32"}
    for name in ("b1", "b4"):
        cell = found["cells"][name]
        assert cell["measured"]["ms"] > 0
        assert cell["error"] == pytest.approx(cell["predicted"]["ms"] / cell["measured"]["ms"] - 1)
    assert found["cells"]["b8"]["measured"] is None
    code, out, _ = shell("fit", long, "--check", "--cells", "b1")
    assert code == 0
    assert "%" in out


def test_calibrate_writes_a_machine_file(shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few figures: every part of a machine is there, positive and of this day."""
    for name, value in {
        "COMMON": ("Q8_0",),
        "ROWS": (1, 8),
        "SWEEPS": 1,
        "CACHED": 1 << 20,
        "MEMORY": 2 << 20,
        "SIZES": (1 << 20,),
        "LAYERS": 2,
        "WHOLE_LAYERS": 1,
        "PREFILL": ((1, 64, 0), (1, 128, 64)),
        "DECODE": ((1, 1, 31), (4, 1, 31), (1, 1, 255)),
        "WHOLE_STEPS": ((1, 1, 31), (1, 64, 0)),
    }.items():
        monkeypatch.setattr(calibrate, name, value)
    code, _, err = shell("fit", tiny_gguf, "--calibrate", "--threads", 1)
    assert code == 0, err
    machine = machines.find("here")
    assert machine is not None
    assert machine.threads == 1
    assert {"Q8_0", "Q4_K", "BF16"} <= set(machine.linear)
    assert machine.host[0] + machine.host[1] > 0
    assert all(factor > 0 for factor in machine.program.fixed) if machine.program else False
    assert msgspec.json.decode(machines.machine_file().read_bytes())["measured"] == machine.measured


REFUSALS = [
    ("CONFIG --tp 3", "--tp 3: must be 1, 2, 4 or 8"),
    ("CONFIG --pp 33", "--pp 33: "),
    ("CONFIG --context -5", "--context -5: must be 1 or more"),
    ("CONFIG --context 5000", "--context 5000: "),
    ("CONFIG --batch 0", "--batch 0: must be 1 or more"),
    ("CONFIG --chunk 0", "--chunk 0: must be 1 or more"),
    ("CONFIG --machine nothing", "--machine nothing: unknown machine"),
    ("CONFIG --weights Q9", "--weights Q9: unknown number format"),
    ("CONFIG --quantize int3", "--quantize int3: must be int8 or int4"),
    ("CONFIG --kv-dtype int3", "unknown number format 'int3' of K and V"),
    ("CONFIG --memory 3Q", "'3Q' is not a size"),
    ("CONFIG --calibrate --machine a100", "--calibrate measures this machine"),
    ("CONFIG --check --machine a100", "--check runs the model"),
    ("TINY --check --cells b3", "--cells b3: unknown cell"),
    ("TINY --weights Q8_0", "--weights is the format of a model without files"),
    ("TINY --plot PLOT", "--plot draws times"),
    ("CUT", "CUT: "),
    ("LACKS", "LACKS: has no hidden_size"),
    ("nobody/knows", "nobody/knows is not on this machine"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[arguments for arguments, _ in REFUSALS])
def test_bad_input_is_a_one_line_error(
    arguments: str, message: str, shell: Shell, config: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    cut, lacks = tmp_path / "cut.gguf", tmp_path / "lacks.json"
    cut.write_bytes(tiny_gguf.read_bytes()[:-3000])
    lacks.write_text(json.dumps({"model_type": "llama"}))
    places = {"CONFIG": config, "TINY": tiny_gguf, "CUT": cut, "LACKS": lacks, "PLOT": tmp_path / "a.svg"}
    code, out, err = shell("fit", *(places.get(word, word) for word in arguments.split()))
    assert code == 1
    assert out == ""
    (line,) = err.splitlines()
    for word, place in places.items():
        message = message.replace(word, str(place))
    assert message in line


def test_it_answers_without_torch(shell: Shell, config: Path) -> None:
    process = shell.start("fit", config, "--machine", "h100", before=WITHOUT_TORCH)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "H100" in out


def test_the_catalog_has_the_sizes_of_the_files(shell: Shell) -> None:
    """What `fit` says before the download is what the file has, to the byte."""
    for name in ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"):
        entry = catalog.load()[name]
        place = Path.home() / ".cache" / "headrace-test-models" / real_name(entry.file)
        if not place.exists():
            pytest.skip(f"{place.name} is not on this machine")
        before, after = answer(shell, name)["memory"], answer(shell, place)["memory"]
        assert before == {**after, "available": before["available"]}


def real_name(file: str) -> str:
    """Name of the file among the test models."""
    names = {
        "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
    }
    return next((real for begin, real in names.items() if file.startswith(begin)), file)
