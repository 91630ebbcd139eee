"""Speculation compared with other engines: their commands, builds of llama.cpp's programs, and the printed figures."""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import llamacpp_programs as programs
from benchmarks.peers import speculation as bench
from benchmarks.peers.engines import PeerError
from tests.cli_shell import Shell
from tests.places import STORE
from tests.tiny_files import write_tiny_gguf

# A program that echoes its prompt, "answers" and times itself as llama.cpp's do; slower with more tokens drafted.
PROGRAM = """#!{python} -S
import sys
at = sys.argv.index
value = lambda name: sys.argv[at(name) + 1]
if value("-p").count("bad"):
    sys.exit("no room for this")
print("\\n\\n" + value("-p") + "once upon" + "\\n\\n")
print("encoded   12 tokens in    0.500 seconds, speed:   24.000 t/s", file=sys.stderr)
print(f"decoded {{value('-n'):>4}} tokens in    {{value('--spec-draft-n-max')}}.000 seconds, speed: 1.0 t/s", file=sys.stderr)
print("draft" if "-md" in sys.argv else "lookup", value("-c"), file=open(sys.argv[0] + ".log", "a"))
"""


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """llama.cpp's programs as this script, where they are looked for."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    for name in programs.NAMES:
        path = programs.program(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PROGRAM.format(python=sys.executable))
        path.chmod(0o755)
    return write_tiny_gguf(tmp_path / "tiny.gguf")


def test_a_cell_has_a_prompt_for_each_round() -> None:
    cell = bench.TaskCell("code", 1, 3, 8, ids=((1, 2), (3,), (4, 5, 6)))
    assert [cell.prompts(100, number) for number in (-1, 0, 1, 2, 3)] == [[[4, 5, 6]], [[1, 2]], [[3]], [[4, 5, 6]], [[1, 2]]]


def test_options_and_texts_go_with_the_question_and_texts_come_back_as_tokens() -> None:
    asked: list[dict[str, Any]] = []

    class Worker:
        def ask(self, **question: Any) -> dict[str, Any]:
            asked.append(question)
            return {"first": ["word", ""]}

    asking = bench.EngineWithOptions(Worker(), {"most": 3}, {(1, 2): "text"}, lambda text: [7, 8] if text else [])
    assert asking.ask(prompts=[[1, 2]], new_tokens=4) == {"first": [7, -1]}
    assert asked == [{"prompts": ["text"], "new_tokens": 4, "options": {"most": 3}}]
    assert bench.EngineWithOptions(Worker()).ask(prompts=[[5]])["first"] == [-1, -1]
    assert asked[1]["prompts"] == [[5]]


def test_headrace_is_compared_with_the_programs(built: Path) -> None:
    """Both kinds, ours on a real (tiny) model that drafts for itself; the better of two settings counts."""
    said: list[str] = []
    tasks = {"t": ["once upon a time", "the end"]}
    found = bench.compare(
        str(built), str(built), tasks, engines=["llama.cpp"], rounds=2, new_tokens=6, threads=1, say=said.append
    )
    assert list(found["cells"]) == ["t draft", "t lookup"]
    for cell in found["cells"].values():
        assert cell["peers"]["llama.cpp"]["settings"] == {"3 tokens": 2.0, "8 tokens": 0.75}
        assert cell["peers"]["llama.cpp"]["setting"] == "3 tokens"
        assert cell["interval"][0] <= cell["ratio"] <= cell["interval"][1]
        assert cell["tokens_per_s"] > 0
    for name, kind in ((programs.DRAFT, "draft"), (programs.LOOKUP, "lookup")):
        lines = Path(f"{programs.program(name)}.log").read_text().split()
        assert lines == [kind, lines[1]] * 6, "two settings in two rounds and one to warm up"
    assert [line.partition(":")[0] for line in said] == ["headrace draft", "headrace lookup", "llama.cpp speculation"]
    json.dumps(found)


def test_a_failed_program_is_reported_with_its_output(built: Path) -> None:
    with pytest.raises(ValueError, match="llama-lookup failed: no room for this"):
        bench.compare(
            str(built), str(built), {"t": ["bad"]}, engines=["llama.cpp"], kinds=["lookup"], rounds=1, new_tokens=4, threads=1
        )


def test_the_command(built: Path, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    prompts, figures = tmp_path / "words.txt", tmp_path / "figures.json"
    prompts.write_text("once upon a time\n")
    options = ["--draft", built, "-i", prompts, "--engines", "llama.cpp", "--rounds", 1, "-m", 4, "--threads", 1]
    code, out, err = shell(bench.main, built, *options, "--kinds", "lookup", "--json", figures)
    assert code == 0, err
    assert out.splitlines()[1].startswith("words lookup\t")
    assert list(json.loads(figures.read_text())["cells"]) == ["words lookup"]
    assert shell(bench.main, built, *options, "--kinds", "both")[0] != 0


def test_missing_programs_are_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(PeerError, match="programs are not built .* build them with --install"):
        bench.make_ready(["llama.cpp"], False, print)
    with pytest.raises(PeerError, match="openvino is not installed"):
        bench.make_ready(["openvino"], False, print)
    with pytest.raises(PeerError, match="'vllm' has no speculation to compare with"):
        bench.make_ready(["vllm"], False, print)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(PeerError, match="built with cmake, which is not here"):
        bench.make_ready(["llama.cpp"], True, print)


def test_the_programs_are_built_from_the_packages_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip, cmake and the build, as commands: what they are asked for, in which order; a failure names the log."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.setattr(programs.shutil, "which", lambda tool: tool)
    ran: list[list[str]] = []

    def run(command: list[str], what: str) -> None:
        ran.append(command)
        if what == "pip":
            make_archive(tmp_path, Path(command[command.index("--dest") + 1]))

    monkeypatch.setattr(programs, "_run", run)
    programs.make_ready(True, lambda line: None)
    fetched, configured, built = ran
    assert fetched[-1].startswith("llama-cpp-python==")
    assert "--no-binary" in fetched
    assert configured[:3] == ["cmake", "-S", str(programs.folder() / "source" / "vendor" / "llama.cpp")]
    assert (programs.folder() / "source" / "vendor" / "llama.cpp" / "CMakeLists.txt").exists()
    assert built[-2:] == [programs.DRAFT, programs.LOOKUP]
    monkeypatch.undo()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    with pytest.raises(PeerError, match="the compiler failed; .*build.log says why"):
        programs._run([sys.executable, "-c", "raise SystemExit(1)"], "the compiler")


def make_archive(tmp_path: Path, folder: Path) -> None:
    source = tmp_path / "llama_cpp_python-1" / "vendor" / "llama.cpp"
    source.mkdir(parents=True)
    (source / "CMakeLists.txt").write_text("")
    folder.mkdir(parents=True)
    with tarfile.open(folder / "package.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "llama_cpp_python-1", "llama_cpp_python-1")


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.weights
def test_the_programs_agree_with_headrace(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones, where they are built: the first greedy token with a draft model (itself) and by lookup, of most prompts:
    engines round in their own ways."""
    monkeypatch.setenv("HEADRACE_HOME", str(STORE.root.parent))
    if not all(programs.program(name).exists() for name in programs.NAMES):
        pytest.skip(
            f"llama.cpp's programs are not built under {programs.folder()} (python -m benchmarks.peers.speculation … --install)"
        )
    tasks = {"t": ["Count from one to twenty.", "Why is the sky blue?", "Write a poem about snow.", "What is a verb?"]}
    model = str(default_model)
    found = bench.compare(model, model, tasks, engines=["llama.cpp"], rounds=4, new_tokens=8, threads=1)
    for cell in found["cells"].values():
        assert cell["peers"]["llama.cpp"]["same_first_token"] >= 0.75
        assert cell["peers"]["llama.cpp"]["tokens_per_s"] > 0
