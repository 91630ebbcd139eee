"""compare and bench sharing: decoding methods on the same prompts, and the blocks that sharing saves (W8)."""

import csv
import json
from pathlib import Path

import pytest

from headrace.bench import sharing
from headrace.bench.sharing import run_requests
from headrace.bench.strategies import MODES, distinct, mode, rep
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from headrace.workflows.prompts import read_prompts
from tests.cli_shell import Shell


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "The mill"}, {"turns": ["Name a river.", "more"]}, {"messages": [{"role": "user", "content": "hi"}]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_repetition_on_texts_worked_by_hand() -> None:
    assert rep([1, 2, 3, 4] * 3) == pytest.approx(1 - 4 / 9)  # nine 4-grams, four different ones
    assert rep(list(range(50))) == rep([1, 2, 3]) == 0.0
    assert distinct([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5]]) == pytest.approx(2 / 3)
    assert rep([7] * 20) > 0.9 > distinct([[7] * 20])


def test_prompts_of_all_kinds(prompts: Path, tmp_path: Path) -> None:
    assert read_prompts(prompts) == ["The mill", "Name a river.", [{"role": "user", "content": "hi"}]]
    assert read_prompts(prompts, 1) == ["The mill"]
    plain = tmp_path / "plain.txt"
    plain.write_text("one\n\ntwo\n")
    assert read_prompts(plain) == ["one", "two"]
    plain.with_suffix(".jsonl").write_text('{"prompt": 5}')
    with pytest.raises(ValueError, match="line 1 has no text"):
        read_prompts(plain.with_suffix(".jsonl"))


def test_every_mode_has_parameters() -> None:
    assert all(isinstance(mode(name, 9, 0), SamplingParams) for name in MODES)
    assert mode("beam6", 9, 0).beam == BeamSearchParams(beam_width=6, max_tokens=9)
    assert mode("best3", 9, 1).best_of == 3
    for wrong in ("greedy2", "beamx", "nothing"):
        with pytest.raises(ValueError, match="there is no method"):
            mode(wrong, 9, 0)


def test_compare_prints_a_table_and_writes_every_answer(shell: Shell, tiny_gguf: Path, prompts: Path, tiny_llm: LLM) -> None:
    target = prompts.with_name("out.csv")
    names = "greedy,sample,beam3,best4,dry"
    code, out, err = shell(
        "compare", tiny_gguf, "-i", prompts, "--modes", names, "-m", "12", "--csv", target, "--dtype", "float64"
    )
    assert code == 0, err
    assert [line.split()[0] for line in out.splitlines()] == ["method", *names.split(",")]
    rows = list(csv.DictReader(target.open(encoding="utf-8", newline="")))
    assert [row["mode"] for row in rows] == [name for name in names.split(",") for _ in range(3)]
    prompt = tiny_llm.tokenizer.encode("The mill")  # continued unchanged, as generate does
    for row, params in (
        (rows[0], SamplingParams(temperature=0.0, max_tokens=12)),
        (rows[6], BeamSearchParams(beam_width=3, max_tokens=12)),
    ):
        (expected,) = tiny_llm.generate(prompt, params)
        assert row["text"] == expected.outputs[0].text
        assert int(row["tokens"]) == len(expected.outputs[0].token_ids)
        assert float(row["rep_4"]) == pytest.approx(rep(expected.outputs[0].token_ids), abs=1e-4)
    code, _, err = shell("compare", tiny_gguf, "-i", prompts, "--modes", "greedy,nothing")
    assert (code, "there is no method 'nothing'" in err) == (1, True)


def test_compare_reads_lines_as_generate_does(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    lines = [
        {"id": "raw", "prompt": "The mill", "max_tokens": 3, "kind": "a label"},
        {"id": "talk", "messages": [{"role": "user", "content": "The mill"}], "max_tokens": 5},
        {"id": "ids", "prompt_token_ids": [5, 6], "max_tokens": 4},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.csv"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = shell("compare", tiny_gguf, "-i", source, "--modes", "greedy", "--csv", target, "--dtype", "float64")
    assert code == 0, err
    rows = list(csv.DictReader(target.open(encoding="utf-8", newline="")))
    assert [int(row["tokens"]) for row in rows] == [3, 5, 4]
    source.write_text("".join(json.dumps({k: v for k, v in line.items() if k != "kind"}) + "\n" for line in lines))
    answers = tmp_path / "out.jsonl"
    assert shell("generate", tiny_gguf, "-i", source, "-o", answers, "-t", "0", "--dtype", "float64")[0] == 0
    found = {one["id"]: one["outputs"][0]["text"] for one in map(json.loads, answers.read_text("utf-8").splitlines())}
    assert [row["text"] for row in rows] == [found[line["id"]] for line in lines]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "a", "nonsense": 1}, "line 1: unknown field 'nonsense'"),
        ({"prompt": "a", "temperature": 0.5}, "line 1: temperature: --modes sets this field"),
        ({"prompt": "a", "max_token": 4}, "line 1: unknown field 'max_token'; did you mean"),
        ({"prompt": 5}, "line 1: prompt must be text, not int"),
        ({"turns": []}, "line 1: turns must be a list of texts"),
        ([1], "line 1: a line must be a JSON object"),
    ],
)
def test_a_field_without_effect_is_refused(line: object, message: str, shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(line) + "\n")
    code, out, err = shell("compare", tiny_gguf, "-i", source, "--modes", "greedy")
    assert (code, out) == (1, "")
    assert message in err
    assert "loading" not in err


@pytest.mark.parametrize(
    ("modes", "more", "message"),
    [
        ("", (), "names no method"),
        ("greedy,contrastive-decoding", (), "--amateur MODEL"),
        ("greedy", ("--csv", "nowhere/out.csv"), "the folder nowhere does not exist"),
    ],
)
def test_unsupported_modes_are_refused_before_loading(
    shell: Shell, tiny_gguf: Path, prompts: Path, modes: str, more: tuple[str, ...], message: str
) -> None:
    code, out, err = shell("compare", tiny_gguf, "-i", prompts, "--modes", modes, *more)
    assert (code, out) == (2, "")
    assert message in err
    assert "KV cache" not in err  # the model was not opened


def test_w8_beams_share_most_of_their_blocks(tiny_llm: LLM) -> None:
    """n beams do not take n times the memory: the seed's statement, measured."""
    prompt = list(range(5, 40))
    rows = {(row.method, row.width): row for row in sharing.measure(tiny_llm, [prompt], 48, (2, 4))}
    assert rows["beam", 4].saved > 0.3
    assert rows["beam", 4].shared < 0.7 * rows["beam", 4].unshared
    assert 0.1 < rows["parallel", 4].saved < rows["beam", 4].saved
    alone = run_requests(tiny_llm, [prompt], SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True))
    assert alone.saved == 0.0  # the counter does not see sharing where there is none
    assert alone.peak[alone.outputs[0].request_id] == -(-(35 + 47) // 16)


def test_bench_sharing_prints_the_table(shell: Shell, tiny_gguf: Path, prompts: Path) -> None:
    code, out, _ = shell("bench", "sharing", tiny_gguf, "-i", prompts, "--prompts", "2", "-m", "20")
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [[m, str(w)] for m in ("parallel", "beam") for w in (2, 4, 6)]
