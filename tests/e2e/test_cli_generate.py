"""generate: every line is answered once, also after a kill; invalid lines are reported; no line is half written."""

import errno
import json
import os
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import generate
from headrace.cli.app import main
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.llm import LLM
from headrace.workflows import batch, batch_output
from headrace.workflows.batch_output import BatchOutput
from headrace.workflows.batch_requests import BatchRequest, InvalidLine, read_requests
from tests.cli_shell import Shell

EXACT = ("--dtype", "float64")


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def read(path: Path) -> dict[Any, dict[str, Any]]:
    """id → record of an output file; every id once."""
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert len({record["id"] for record in records}) == len(records)
    return {record["id"]: record for record in records}


def many(path: Path, count: int = 12) -> Path:
    """Requests that end at different times."""
    lines = [{"id": i, "prompt": f"The water {i}", "max_tokens": 2 + i % 5, "temperature": 0} for i in range(count)]
    return write(path, *lines)


def texts(records: dict[Any, dict[str, Any]]) -> dict[Any, list[str]]:
    return {key: [one["text"] for one in record["outputs"]] for key, record in records.items()}


def test_lines_of_beams_and_best_of(shell: Shell, tiny_gguf: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "beams", "prompt": "The wheel", "beam_width": 3, "n": 2, "max_tokens": 6, "length_penalty": 0.5},
        {"id": "best", "prompt": "The wheel", "best_of": 3, "max_tokens": 6, "seed": 1},
        {"id": "wrong", "prompt": "The wheel", "length_penalty": 0.5},
    )
    code, _, err = shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl", *EXACT)
    found = read(tmp_path / "out.jsonl")
    assert code == 1, err
    assert "length_penalty goes with beam_width" in found["wrong"]["error"]
    wanted = {
        "beams": BeamSearchParams(beam_width=3, n=2, max_tokens=6, length_penalty=0.5),
        "best": SamplingParams(best_of=3, max_tokens=6, seed=1),
    }
    for name, params in wanted.items():
        (expected,) = tiny_llm.generate("The wheel", params)
        assert [one["text"] for one in found[name]["outputs"]] == [one.text for one in expected.outputs]
        assert [one["score"] for one in found[name]["outputs"]] == [one.score for one in expected.outputs]


def test_all_kinds_of_lines(shell: Shell, tiny_gguf: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "水轮，你好"}]
    body = {"model": "any", "messages": talk, "max_completion_tokens": 4, "temperature": 0, "stop": None, "stream": False}
    source = write(
        tmp_path / "in.jsonl",
        {"prompt": "The wheel", "max_tokens": 30, "temperature": 0},
        {"id": "talk", "messages": talk, "max_tokens": 4, "temperature": 0},
        "",
        {"custom_id": "api", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {
            "custom_id": "old",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [5, 6], "max_tokens": 3, "logprobs": 1, "seed": 1},
        },
        {"id": 7, "prompt_token_ids": [5, 6], "n": 2, "seed": 1, "max_tokens": 3},
    )
    code, out, err = shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl", *EXACT)
    assert (code, out) == (0, "")
    assert "tokens/s" in err
    assert err.endswith(f"5 lines are done: {tmp_path / 'out.jsonl'}\n")

    found = read(tmp_path / "out.jsonl")
    assert list(found)[-1] == "line-1", "answers come as they are completed, and this one is the longest"
    greedy = SamplingParams(temperature=0, max_tokens=4)
    (said,) = tiny_llm.chat(talk, greedy)
    (drawn,) = tiny_llm.generate([5, 6], SamplingParams(n=2, seed=1, max_tokens=3))
    (long,) = tiny_llm.generate("The wheel", greedy.replace(max_tokens=30))
    assert texts(found) == {
        "line-1": [long.outputs[0].text],
        "talk": [said.outputs[0].text],
        "api": [said.outputs[0].text],
        "old": [drawn.outputs[0].text],
        7: [one.text for one in drawn.outputs],
    }
    assert {key: one["finish_reason"] for key, one in found.items()} == dict.fromkeys(found, "length")
    assert all(one["error"] is None for one in found.values())
    assert found[7]["usage"] == {"prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 6, "total_tokens": 8}
    assert len(found["old"]["outputs"][0]["logprobs"]) == 3


def test_settings_of_the_command_are_the_defaults_of_lines(
    shell: Shell, tiny_gguf: Path, tiny_llm: LLM, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl", {"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "max_tokens": 2})
    assert shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl", "-m", "5", "-t", "0", *EXACT)[0] == 0
    (expected,) = tiny_llm.generate("x", SamplingParams(temperature=0, max_tokens=5))
    found = texts(read(tmp_path / "out.jsonl"))
    assert found["a"] == [expected.outputs[0].text]
    assert found["b"] == [tiny_llm.tokenizer.decode(expected.outputs[0].token_ids[:2])]


BAD = [
    ("nope", "the line is not JSON: invalid character at byte"),
    ("[1]", "a line must be a JSON object, not list"),
    ('{"id": "x", "prompt": "a", "prompt": "b"}', "field 'prompt' occurs twice"),
    ("[" * 100_000, "nested too deeply"),
    ({"id": "x"}, "exactly one of prompt, messages, prompt_token_ids; this one has none"),
    ({"prompt": "a", "messages": []}, "this one has prompt and messages"),
    (
        {"prompt": "a", "temprature": 1},
        "unknown field 'temprature'; did you mean temperature? (headrace generate --help says more)",
    ),
    ({"prompt": "a", "model": "m"}, "unknown field 'model'; a line has id, prompt (or messages"),
    ({"prompt": 5}, "prompt must be text, not int"),
    ({"prompt_token_ids": ["a"]}, "prompt_token_ids must be a list of integers"),
    ({"prompt_token_ids": [True]}, "prompt_token_ids must be a list of integers"),
    ({"id": "line-9", "prompt": "a"}, "the id must be printable text other than line-N"),
    ({"id": 1.5, "prompt": "a"}, "the id must be text or an integer, not 1.5"),
    ({"id": "\x1b[2J", "prompt": "a"}, "the id must be printable text"),
    ({"prompt": "a", "logit_bias": {"five": 1}}, "logit_bias must map token ids to numbers"),
    ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "url must be /v1/chat/completions or /v1/completions"),
    ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "method must be POST"),
    ({"custom_id": "x", "extra": 1, "url": "/v1/completions", "body": {}}, "unknown field 'extra'"),
    ({"custom_id": "x", "url": "/v1/chat/completions", "body": {"prompt": "a"}}, "has 'messages', not 'prompt'"),
    ({"custom_id": "x", "url": "/v1/completions", "body": {"prompt": ["a", "b"]}}, "give each text a line of its own"),
    (
        {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}},
        "stream: a file of answers is not streamed; remove it",
    ),
    (
        {"custom_id": "x", "url": "/v1/completions", "body": {"prompt": "a", "suffix": "b"}},
        "suffix: text cannot be inserted before a suffix",
    ),
    ({"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": [], "tools": [{}]}}, "tool 0 must be a function"),
    ({"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": [], "foo": 1}}, "unknown field 'foo'"),
    (
        {"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": [], "logprobs": 3}},
        "logprobs: must be true or false",
    ),
    (
        {"custom_id": "x", "url": "/v1/chat/completions", "body": {"messages": [], "top_logprobs": 3}},
        "top_logprobs goes with logprobs: true",
    ),
    ({"url": "/v1/chat/completions", "body": 5}, "body must be a JSON object"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}}, "custom_id must be text of 1 to 512 characters"),
    ({"custom_id": 5, "url": "/v1/completions", "body": {"prompt": "a"}}, "custom_id must be text of 1 to 512 characters"),
]


@pytest.mark.parametrize(("line", "clue"), BAD)
def test_an_invalid_line_is_reported(line: object, clue: str, tmp_path: Path) -> None:
    (found,) = read_requests(write(tmp_path / "in.jsonl", line))
    assert isinstance(found, InvalidLine)
    assert found.error.startswith("line 1: ")
    assert clue in found.error


def test_fields_of_a_line_become_a_request(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi"}]
    api = {"messages": talk, "user": "u", "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}}
    source = write(
        tmp_path / "in.jsonl",
        '\ufeff{"id": 3, "prompt": "a", "seed": null, "stop": ["x"]}',
        {"custom_id": "b", "url": "/v1/chat/completions", "body": api},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": ["a"], "logprobs": 4}},
        {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "again"}},
        {
            "custom_id": "e\nf",
            "method": None,
            "url": "/v1/completions",
            "body": {"prompt": [[1, 2]], "echo": False, "top_k": 5},
        },
        {"id": "d", "prompt_token_ids": [1.0, 2], "max_tokens": 5.0, "temperature": 0.5},
        {"custom_id": "g", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 5.0}},
    )
    assert list(read_requests(source)) == [
        BatchRequest(1, 3, prompt="a", params={"stop": ["x"]}),
        BatchRequest(2, "b", messages=talk, params={"max_tokens": 3, "logprobs": 2, "logit_bias": {5: 1}}),
        BatchRequest(3, "c", prompt="a", params={"logprobs": 4}),
        InvalidLine("line-4", "line 4: id 'c' is that of line 3, too; give each line its own"),
        BatchRequest(5, "e\nf", prompt_token_ids=[1, 2], params={"top_k": 5}),
        BatchRequest(6, "d", prompt_token_ids=[1, 2], params={"max_tokens": 5, "temperature": 0.5}),
        BatchRequest(7, "g", prompt="a", params={"max_tokens": 5}),
    ]


def test_generated_ids_differ_from_given_ids(tmp_path: Path) -> None:
    ask = {"url": "/v1/completions", "body": {"prompt": "a"}}
    lines = (
        {"custom_id": "line-2", **ask},
        "{",
        {"prompt": "a"},
        {"custom_id": "line-3", **ask},
        {"custom_id": "line-9", **ask},
    )
    found = list(read_requests(write(tmp_path / "in.jsonl", *lines)))
    assert [one.id for one in found] == ["line-2", "line-2+", "line-3", "line-4", "line-9"]
    assert [isinstance(one, InvalidLine) for one in found] == [False, True, False, True, False]


def test_bad_lines_are_reported_and_skipped(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        {"id": "nan", "prompt": "a", "temperature": float("nan")},
        {"id": "good", "prompt": "a", "max_tokens": 2},
        {"id": "typo", "prompt": "a", "topp": 1},
        {"id": "empty", "prompt": ""},
        {"id": "long", "prompt": "水" * 600},
        {"id": "ids", "prompt_token_ids": [1, 99999]},
        {"id": "wide", "prompt": "a", "n": 60},
        {"id": "role", "messages": [{"content": "x"}]},
        {"id": "types", "prompt": "a", "stop": {"a": 1}, "bad_words": [1]},
        {"id": "surrogate", "prompt": "\udc80"},
        "{",
    )
    code, _, err = shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl")
    assert code == 1
    assert "11 lines are done, 10 with an error" in err
    found = read(tmp_path / "out.jsonl")
    clues = {
        "line-1": "NaN at byte 44 is not a number of JSON",
        "typo": "line 3: unknown field 'topp'",
        "empty": "line 4: the prompt is empty",
        "long": "the context holds 512",
        "ids": "prompt token 99999 is not in the vocabulary",
        "wide": "60 sequences at once",
        "role": "message 0 needs a role",
        "types": "bad_words must be lists of token ids",
        "line-10": "is a lone surrogate",
        "line-11": "not JSON",
    }
    for key, clue in clues.items():
        assert clue in found[key]["error"]
        assert found[key] | {"error": ""} == {"id": key, "outputs": [], "finish_reason": "error", "usage": None, "error": ""}
    assert found["good"]["error"] is None
    assert len(found) == 11
    assert shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl")[0] == 1, "a second time, too"


# A kill in the middle of a line, and a Ctrl-C in the middle of the work, at the record that the test names.
KILLED_AT = """
import os
write, records = os.write, 0
def dying(fd, data):
    global records
    records += data.startswith(b'{{"id"')
    if records == {record}:
        {end}
    return write(fd, data)
os.write = dying
"""
KILL = "write(fd, data[: len(data) // 2]); os.kill(os.getpid(), signal.SIGKILL)"
CTRL_C = "signal.raise_signal(signal.SIGINT)"


def run_until(shell: Shell, record: int, end: str, *arguments: object) -> "subprocess.CompletedProcess[str]":
    return shell.forked(*arguments, before=KILLED_AT.format(record=record, end=end))


@pytest.mark.parametrize("record", [1, 5])
def test_after_a_kill_no_line_is_done_twice(shell: Shell, tiny_gguf: Path, tmp_path: Path, record: int) -> None:
    source, target = many(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    command = ("generate", tiny_gguf, "-i", source, "-o", target)
    assert run_until(shell, record, KILL, *command).returncode == -signal.SIGKILL
    torn = target.read_bytes()
    assert torn.count(b"\n") == record - 1
    assert not torn.endswith(b"\n"), "the kill came in the middle of a line"

    code, _, err = shell(*command)
    assert code == 0
    assert "12 lines are done" in err
    assert target.read_bytes().startswith(torn[: torn.rfind(b"\n") + 1]), "what was done stays as it was"
    assert shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "whole.jsonl")[0] == 0
    assert texts(read(target)) == texts(read(tmp_path / "whole.jsonl"))


def test_ctrl_c_leaves_whole_lines(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = many(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    command = ("generate", tiny_gguf, "-i", source, "-o", target, "--max-num-seqs", "1")
    stopped = run_until(shell, 3, CTRL_C, *command)
    assert stopped.returncode == 130
    done = len(read(target))
    assert 3 <= done < 12
    assert f"{done} of 12 lines are done; the same command continues" in stopped.stderr
    assert stopped.stderr.endswith("headrace: interrupted\n")
    assert "Traceback" not in stopped.stderr
    assert shell(*command)[0] == 0
    assert set(read(target)) == set(range(12))


def test_a_full_disk_leaves_whole_lines(shell: Shell, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = many(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    real, room = os.write, [400]

    def small(fd: int, data: bytes) -> int:
        if not data.startswith(b'{"id"') and room[0] == 400:
            return real(fd, data)
        if room[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(fd, data[: room[0]])
        room[0] -= written
        return written

    monkeypatch.setattr(batch_output.os, "write", small)
    code, _, err = shell("generate", tiny_gguf, "-i", source, "-o", target)
    monkeypatch.setattr(batch_output.os, "write", real)
    assert code == 1
    assert f"the disk of {tmp_path} is full; free some space, then the same command continues" in err.splitlines()[-1]
    assert 0 < len(read(target)) < 12, "whole lines only"
    assert shell("generate", tiny_gguf, "-i", source, "-o", target)[0] == 0
    assert set(read(target)) == set(range(12))


def test_a_finished_file_needs_no_model(shell: Shell, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, out = many(tmp_path / "one.jsonl", 1), tmp_path / "one.out.jsonl"
    assert shell("generate", tiny_gguf, "-i", one, "-o", out)[2].endswith(f"1 line is done: {out}\n")
    source, target = many(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    assert shell("generate", tiny_gguf, "-i", source, "-o", target)[0] == 0
    before = target.read_bytes()
    monkeypatch.setattr(generate, "open_llm", lambda *_, **__: pytest.fail("the model was opened"))
    code, _, err = shell("generate", tiny_gguf, "-i", source, "-o", target)
    assert (code, err) == (0, f"3 lines are done: {target}\n")
    assert target.read_bytes() == before


def test_resuming_requires_the_same_model_input_and_settings(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source, target = many(tmp_path / "in.jsonl", 3), tmp_path / "out.jsonl"
    command = ("generate", tiny_gguf, "-i", source, "-o", target)
    assert shell(*command)[0] == 0
    before = target.read_bytes()

    def refused(clue: str, *arguments: object) -> None:
        code, out, err = shell(*arguments)
        assert (code, out) == (1, "")
        assert clue in err
        assert len(err.splitlines()) == 1
        assert target.read_bytes() == before

    refused("started with different settings", *command, "--temperature", "0.3")
    other = tmp_path / "other.gguf"
    other.write_bytes(tiny_gguf.read_bytes())
    refused("started with different model", "generate", other, *command[2:])
    many(source, 4)
    refused("started with different input; name another file, or start again with --overwrite", *command)
    assert shell(*command, "--overwrite")[0] == 0
    assert set(read(target)) == set(range(4))


def test_places_that_cannot_be_used(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = many(tmp_path / "in.jsonl", 1)
    (tmp_path / "notes.txt").write_text("mine\n")
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    before = sorted(tmp_path.iterdir())
    for arguments, code, clue in [
        (("-i", source, "-o", source), 2, "input and output are the same file"),
        (("-i", source, "-o", tmp_path), 1, "is not a file; name a file for the output"),
        (("-i", source, "-o", tmp_path / "none" / "out.jsonl"), 1, "does not exist; create it first"),
        (("-i", source, "-o", tmp_path / "notes.txt"), 1, "exists and was not written by this command"),
        (("-i", tmp_path / "none.jsonl", "-o", tmp_path / "out.jsonl"), 2, "does not exist"),
        (("-i", tmp_path, "-o", tmp_path / "out.jsonl"), 2, "is a directory"),
        (("-i", fifo, "-o", tmp_path / "out.jsonl"), 1, "cannot be a pipe"),
        (("-i", source), 2, "--output"),
        (("-i", source, "-o", tmp_path / "out.jsonl", "--max-num-seqs", "0"), 2, "--max-num-seqs"),
        (("-i", source, "-o", tmp_path / "out.jsonl", "-t", "-1"), 2, "temperature must be"),
        (("-i", source, "-o", tmp_path / "out.jsonl", "--max-model-len", "9999"), 1, "--max-model-len 9999"),
    ]:
        found, out, err = shell("generate", tiny_gguf, *arguments)
        assert (found, out) == (code, ""), err
        assert clue in err
        assert [line for line in err.splitlines() if not line.startswith("loading ")] == err.splitlines()[-1:]
        assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    first, second = (BatchOutput(tmp_path / "out.jsonl", {"input": "x"}) for _ in range(2))
    first.read_existing()
    second.read_existing()
    first.lock()
    first.start()
    with pytest.raises(ValueError, match="another process is writing"):
        second.lock()
    first.append({"id": "a", "error": None})
    first.close()
    with pytest.raises(ValueError, match="another process"):
        second.lock()
    assert (tmp_path / "out.jsonl").read_text() == '{"id": "a", "error": null}\n'


def test_a_batch_from_python(shell: Shell, tiny_gguf: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    """`batch.run` writes the command's records, refuses another setting, and answers no line a second time."""
    source, target = many(tmp_path / "in.jsonl", 4), tmp_path / "python.jsonl"
    with source.open("a") as lines:
        lines.write('{"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [], "n": "two"}}\n')
    done = batch.run(tiny_llm, source, target, top_k=5)
    assert (done.path, done.done, done.failed, done.complete) == (target, {0, 1, 2, 3, "chat"}, 1, True)
    assert shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "cli.jsonl", "--top-k", "5", *EXACT)[0] == 1
    assert read(target) == read(tmp_path / "cli.jsonl")
    before = target.read_bytes()
    assert batch.run(tiny_llm, source, target, top_k=5).failed == 1
    assert target.read_bytes() == before
    with pytest.raises(ValueError, match="started with different settings"):
        batch.run(tiny_llm, source, target, top_k=6)


def test_requests_enter_the_engine_as_it_empties(
    shell: Shell, tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, inside = many(tmp_path / "in.jsonl", 40), Counter[int]()
    step = LLM.step

    def counted(self: LLM) -> Any:
        inside[len(self.engine.requests)] += 1
        return step(self)

    monkeypatch.setattr(LLM, "step", counted)
    command = ["generate", str(tiny_gguf), "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--max-num-seqs", "2"]
    assert main(command) == 0
    window = batch.READ_AHEAD * 2
    assert max(inside) == window, "never more than can soon run, however long the file"
    assert inside[window] > 10, "and always enough"
