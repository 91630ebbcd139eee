"""Names that a user gives to models, with settings and a template, for every command, the server and Python."""

import json
from pathlib import Path

import pytest

from headrace.cli import run as run_module
from headrace.cli.help import complete_model
from headrace.cli.serve_models import served_name
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.startup.opening import open_model
from headrace.weights import names
from headrace.weights.defaults import FALLBACK
from tests.cli_shell import Shell
from tests.server.harness import Running
from tests.tiny_bert import write_tiny_bert

LOUD = "{% for message in messages %}{{ message['content'] | upper }}!{% endfor %}"


@pytest.fixture
def mill(shell: Shell, tiny_gguf: Path) -> str:
    """A name with a setting and a template of its own."""
    (shell.folder / "loud.jinja").write_text(LOUD)
    options = ("-t", "0.3", "--stop", "END", "-m", "7", "--template", shell.folder / "loud.jinja")
    code, _, err = shell("add", "mill", tiny_gguf, *options)
    assert code == 0, err
    settings = "temperature 0.3 (name), top_k 40, top_p 0.95, min_p 0.05 (default), max_tokens 7, stop END (name)"
    assert err == f"mill: {tiny_gguf}, {settings}\n"
    return "mill"


def test_a_name_runs_with_its_settings_and_template(
    shell: Shell, mill: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[tuple[object, SamplingParams]] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, params, *_: used.append((prompt, params)) or 0)
    assert shell("run", mill, "hi")[0] == 0
    assert shell("run", mill, "hi", "-t", "1", "-m", "9")[0] == 0
    words = open_model(tiny_gguf).tokenizer.encode("HI!", add_special=False)
    own = SamplingParams(**{**FALLBACK, "temperature": 0.3}, stop=("END",), max_tokens=7)
    assert used == [(words, own), (words, own.replace(temperature=1.0, max_tokens=9))]
    assert "mill" in complete_model("mi")
    assert served_name(mill) == "mill"


def test_python_and_the_server_take_it(shell: Shell, mill: str) -> None:
    llm = LLM(mill, dtype="float64", threads=1)
    (expected,) = llm.chat("hi", seed=2)
    assert expected.prompt_token_ids == llm.tokenizer.encode("HI!", add_special=False)
    assert 0 < len(expected.outputs[0].token_ids) <= 7
    with Running(mill, model_name=mill) as server:
        (model,) = server.http.get("/v1/models").json()["data"]
        body = {"model": "mill", "messages": [{"role": "user", "content": "hi"}], "seed": 2}
        said = server.http.post("/v1/chat/completions", json=body).json()
    assert model["id"] == "mill"
    assert model["defaults"]["temperature"] == {"value": 0.3, "origin": "name", "of": ""}
    assert said["choices"][0]["message"]["content"] == expected.outputs[0].text


def test_a_name_has_a_system_prompt(shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a conversation says itself goes before it; `--system ""` is none."""
    (shell.folder / "plain.jinja").write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}")
    options = ("--system", "Be brief.", "--template", shell.folder / "plain.jinja")
    assert shell("add", "brief", tiny_gguf, *options)[0] == 0
    assert "system:          Be brief." in shell("show", "brief")[1]
    used: list[list[int]] = []
    monkeypatch.setattr(run_module, "_answer", lambda llm, prompt, *_: used.append(prompt) or 0)
    assert [shell("run", "brief", "hi", *more)[0] for more in ((), ("--system", "Else."), ("--system", ""))] == [0, 0, 0]
    encode = open_model(tiny_gguf).tokenizer.encode
    whole, other, bare = (encode(text, add_special=False) for text in ("s:Be brief. u:hi ", "s:Else. u:hi ", "u:hi "))
    assert used == [whole, other, bare]
    with LLM("brief", dtype="float64", threads=1) as llm:
        own = {"role": "system", "content": "Else."}
        outputs = llm.chat(["hi", [own, {"role": "user", "content": "hi"}]], max_tokens=1)
        assert [output.prompt_token_ids for output in outputs] == [whole, other]
    with Running("brief", model_name="brief") as server:
        counted = server.http.post(
            "/tokenize", json={"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
        )
        assert counted.json()["tokens"] == whole
    assert shell("cp", "brief", "silent", "--system", "")[0] == 0
    assert shell("cp", "brief", "twin")[0] == 0
    assert [names.find(one).system for one in ("silent", "twin")] == ["", "Be brief."]  # type: ignore[union-attr]
    assert open_model("silent").with_system([{"role": "user", "content": "hi"}]) == [{"role": "user", "content": "hi"}]


def test_list_show_cp_rm(shell: Shell, mill: str, tiny_gguf: Path) -> None:
    code, out, err = shell("list")
    assert f"mill\t{_size(tiny_gguf)}\t\tnamed\t{tiny_gguf}" in out.splitlines()
    assert f"0 models installed, 0 B in {shell.folder}/home/models" in err
    assert "runs here:       yes" in shell("show", "mill")[1]
    assert f"template:        of its own, {len(LOUD)} characters" in shell("show", "mill")[1]
    assert shell("cp", "mill", "mill-cold", "-t", "0")[0] == 0
    cold = names.find("mill-cold")
    assert cold is not None
    assert (cold.model, cold.template) == (str(tiny_gguf), LOUD)
    assert cold.sampling == {"temperature": 0, "stop": ["END"], "max_tokens": 7}
    assert names.find("mill").sampling["temperature"] == 0.3  # type: ignore[union-attr]
    code, _, err = shell("rm", "mill", stdin="n\n")
    assert code == 1
    assert f"Remove the name mill and its settings ({tiny_gguf} stays)?" in err
    assert names.find("mill") is not None
    code, _, err = shell("rm", "mill", "--yes")
    assert (code, err) == (0, f"mill: the name is gone, {tiny_gguf} stays\n")
    assert tiny_gguf.exists()
    assert [one.name for one in names.given()] == ["mill-cold"]
    assert "'mill' is neither a model of the catalog nor a path; did you mean mill-cold?" in shell("run", "mill", "hi")[2]


def test_the_name_of_an_encoder_has_no_sampling_settings(shell: Shell, tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "bert")
    code, _, err = shell("add", "vectors", folder)
    assert (code, err) == (0, f"vectors: {folder}, an encoder, for embeddings and classes\n")


def test_models_in_a_folder_are_listed_with_sizes(shell: Shell, tiny_gguf: Path) -> None:
    folder = shell.folder / "models"
    folder.mkdir()
    (folder / "a.gguf").symlink_to(tiny_gguf)
    (folder / "b.gguf").write_bytes(b"GGUF")
    (folder / "lora").mkdir()
    (folder / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "x/y"}')
    code, out, _ = shell("list", folder)
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert rows[0] == ["PATH", "SIZE", "RUNS HERE"]
    assert [row[0] for row in rows[1:]] == [str(folder / name) for name in ("a.gguf", "b.gguf", "lora")]
    assert rows[1][1:] == [_size(tiny_gguf), "yes"]
    assert rows[2][2].startswith("no: ")
    assert "is a LoRA adapter for x/y" in rows[3][2]


REFUSED = [
    (("add", "smollm2-135m", "PATH"), "smollm2-135m is a name of the catalog; choose another"),
    (("add", "a/b", "PATH"), "a name is letters and digits"),
    (("add", "wheel", "none.gguf"), "there is no file or folder none.gguf"),
    (("add", "wheel", "PATH", "-t", "-1"), "temperature must be"),
    (("add", "wheel", "mill"), "mill is a name itself; headrace cp mill wheel gives it another"),
    (("add", "wheel", "PATH", "--template", "BAD"), "chat template"),
    (("cp", "nothing", "wheel"), "'nothing' is neither a model of the catalog nor a path"),
]


@pytest.mark.parametrize(("arguments", "expected"), REFUSED)
def test_invalid_names_are_refused(shell: Shell, mill: str, tiny_gguf: Path, arguments: tuple[str, ...], expected: str) -> None:
    bad = shell.folder / "bad.jinja"
    bad.write_text("{% for %}")
    given = {"PATH": tiny_gguf, "BAD": bad}
    code, _, err = shell(*(given.get(one, one) for one in arguments))
    assert code in (1, 2)
    assert expected in err
    assert [one.name for one in names.given()] == ["mill"], "nothing is left of it"


def test_an_unreadable_name_is_reported(shell: Shell, mill: str) -> None:
    path = shell.folder / "home" / "names" / "mill.json"
    path.write_text(json.dumps({"name": "mill", "model": 3}))
    assert "give the name again with: headrace add mill PATH" in shell("run", "mill", "hi")[2]


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1000:.1f} kB" if path.stat().st_size < 10**6 else f"{path.stat().st_size / 1e6:.1f} MB"
