"""The command chat: through pipes, where every answer is checked, and on a terminal."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from headrace.cli import message_input as lines
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.workflows.conversation import Conversation, load
from tests.cli_shell import ERASE, Shell, Terminal
from tests.tiny_files import write_tiny_gguf

GREEDY = ("-t", "0", "-m", "8", "--dtype", "float64")


def answers(llm: LLM, *questions: str, system: str | None = None, count: int = 8) -> list[str]:
    """What a conversation of these messages is answered, each time with all that was said before."""
    said = [{"role": "system", "content": system}] if system else []
    found = []
    for question in questions:
        said.append({"role": "user", "content": question})
        (output,) = llm.chat(said, SamplingParams(temperature=0, max_tokens=count))
        found.append(output.outputs[0].text)
        said.append({"role": "assistant", "content": found[-1]})
    return found


def test_answers_depend_on_earlier_turns(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    code, out, err = shell("chat", tiny_gguf, *GREEDY, stdin='水轮\n\nand then?\\\nand "then"?\n"""one\ntwo"""\n')
    assert code == 0
    assert out.splitlines() == answers(tiny_llm, "水轮", 'and then?\nand "then"?', "one\ntwo")
    assert ">>>" not in out + err, "no prompt where nobody types"
    assert err.count("(cut after max_tokens, 8)") == 3


def test_system_clear_and_retry(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    typed = 'one\n/system Be brief.\ntwo\n/retry\n/clear\n/system\nthree\n/system ""\n/clear\nthree\n/exit\nnever\n'
    code, out, err = shell("chat", tiny_gguf, *GREEDY, "--system", "Be long.", stdin=typed)
    (first,) = answers(tiny_llm, "one", system="Be long.")
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
    ]
    (second,) = tiny_llm.chat(said, SamplingParams(temperature=0, max_tokens=8))
    expected = [first, *[second.outputs[0].text] * 2]
    expected += answers(tiny_llm, "three", system="Be brief.") + answers(tiny_llm, "three")
    assert (code, out.splitlines()) == (0, expected)
    assert "the same answer will come" in err
    assert "system prompt: Be brief." in err
    assert "system prompt: none" in err
    assert "forgotten" in err


def test_settings(shell: Shell, tiny_gguf: Path, tiny_llm: LLM) -> None:
    typed = (
        "/set max_tokens 3\none\n/set preset creative\n/set\n/set temperature -1\n/set colour red\n/set n 2\n/set top_k\n"
        '/set preset wild\n/set stop ["。", "END"]\n/set stop ###\n/set seed none\n/set temperature 0\n/retry\n'
    )
    code, out, err = shell("chat", tiny_gguf, *GREEDY, stdin=typed)
    assert (code, out.splitlines()) == (0, answers(tiny_llm, "one", count=3) * 2)
    shown = [line.split()[:2] for line in err.splitlines()]
    assert ["temperature", "1.1"] in shown
    assert ["min_p", "0.05"] in shown
    assert ["max_tokens", "3"] in shown, "a preset leaves the length alone"
    assert ["top_k", "0"] in shown[shown.index(["min_p", "0.05"]) + 6 :], "a name alone shows that one"
    for line in (
        "headrace: temperature must be between 0 and 100, not -1",
        "headrace: unknown preset wild; known: precise, balanced, creative",
        'stop: ["。", "END"]',
        'stop: ["###"]',
        "seed: none",
    ):
        assert line in err.splitlines()
    assert "headrace: unknown setting colour; /set all lists them" in err
    assert "headrace: unknown setting n; /set all lists them" in err


def test_save_and_load(shell: Shell, tiny_gguf: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    file, notes = tmp_path / "talk.json", tmp_path / "notes.txt"
    notes.write_text("mine\n")
    typed = f"你好\n/save {file}\n/save {notes}\n/save {tmp_path}/none/x\n/save\n/load {notes}\n/load {tmp_path}/none\ntwo\n"
    code, out, err = shell("chat", tiny_gguf, *GREEDY, "--system", "短", stdin=typed)
    first, second = answers(tiny_llm, "你好", "two", system="短")
    assert (code, out.splitlines()) == (0, [first, second])
    assert f"headrace: {notes} is not a saved conversation; name another file" in err.splitlines()
    assert "cannot be written (No such file or directory)" in err
    assert "cannot be read (No such file or directory)" in err
    assert "headrace: /save takes a file name" in err
    assert notes.read_text() == "mine\n"
    saved = json.loads(file.read_text("utf-8"))
    assert saved["system"] == "短"
    assert [message["content"] for message in saved["messages"]] == ["你好", first]

    assert shell("chat", tiny_gguf, *GREEDY, "--load", file, stdin="two\n")[1].splitlines() == [second]
    assert shell("chat", tiny_gguf, *GREEDY, stdin=f"/load {file}\ntwo\n/save {file}\n")[1].splitlines() == [second]
    assert len(json.loads(file.read_text("utf-8"))["messages"]) == 4
    assert sorted(path.name for path in tmp_path.glob("*.*")) == ["notes.txt", "talk.json"]


def test_stats_help_and_unknown_commands(shell: Shell, tiny_gguf: Path) -> None:
    code, out, err = shell("chat", tiny_gguf, *GREEDY, stdin="/stats\nhi\n/stats\n/help\n/flush\n/\n/retry\n/clear\n/retry\n")
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "0 turns, 0 of 512 tokens of context, 0 tokens answered" in err
    assert "1 turn, " in err
    assert "last answer: " in err
    assert "TTFT" in err
    for name in ("/system", "/set", "/clear", "/retry", "/save", "/load", "/stats", "/help", '"""', "backslash", "Ctrl-C"):
        assert name in err
    assert "headrace: unknown command /flush; /help lists them" in err
    assert "headrace: there is nothing to answer again" in err


def test_at_the_context_limit_the_oldest_turns_are_dropped(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    small = write_tiny_gguf(tmp_path / "small.gguf", context=128)
    talk = "".join(f"这是第{i}条消息，水渠里的水推动水轮\n" for i in range(8))
    code, out, err = shell("chat", small, *GREEDY, stdin=f"{talk}/save {tmp_path}/talk.json\n")
    assert code == 0
    assert len(out.splitlines()) == 8, "every message is answered"
    assert "headrace: " not in err
    said = [line for line in err.splitlines() if line.startswith("(the context")]
    assert said[0].startswith("(the context of 128 tokens is full: the oldest turn is forgotten, from: 这是第")
    assert said[0].endswith("…)")
    assert all(cell_len(line) <= 80 for line in said), "one line of the terminal, of two cells a character"
    kept = load(tmp_path / "talk.json").turns
    assert len(kept) == 8 - sum("the oldest turn is" in line for line in said)
    assert "第7条" in kept[-1][0]["content"]


def test_an_answer_up_to_the_limit_and_a_message_beyond_it(shell: Shell, tmp_path: Path) -> None:
    small = write_tiny_gguf(tmp_path / "small.gguf", context=96)
    typed = f"go on\n{'水' * 200}\n/set max_tokens 4\nshort\n/stats\n"
    code, out, err = shell("chat", small, "-t", "0", stdin=typed)
    assert code == 0
    assert len(out.splitlines()) == 2
    assert "(cut: the context is full)" in err
    assert "the context holds 96, the answer included; shorten the prompt" in err
    assert "1 turn," in err, "what cannot be answered does not stay, and the turn before it had to go"


def test_a_model_without_a_template_cannot_chat(shell: Shell, tmp_path: Path) -> None:
    plain = write_tiny_gguf(tmp_path / "plain.gguf", template=None)
    code, out, err = shell("chat", plain)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith(f"headrace: {plain} has no chat template, so it cannot chat")


@pytest.mark.parametrize(
    "data",
    [
        "[]",
        '{"format": "headrace chat"}',
        '{"format": "headrace chat", "messages": [{"role": "assistant", "content": "x"}]}',
        '{"format": "headrace chat", "messages": [{"role": "user", "content": "x"}]}',
        '{"format": "headrace chat", "messages": [{"role": "user", "content": 5}]}',
        '{"format": "headrace chat", "system": 5, "messages": []}',
        "\xff",
    ],
)
def test_invalid_conversation_files_are_refused(data: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(data.encode("latin-1"))
    with pytest.raises(ValueError, match="x.json"):
        load(file)
    with pytest.raises(ValueError, match="x.json"):
        Conversation().save(file, "m")
    assert file.read_bytes() == data.encode("latin-1")


# -- on a terminal -------------------------------------------------------------------------------------------------------
@pytest.fixture
def terminal(shell: Shell, tmp_path: Path) -> Iterator[Terminal]:
    """A chat whose answers go on for very long."""
    model = write_tiny_gguf(tmp_path / "long.gguf", context=200_000)
    with Terminal("chat", model, "-t", "0") as running:
        running.wait_for(lines.PROMPT)
        yield running


def test_on_a_terminal(terminal: Terminal, shell: Shell) -> None:
    assert "/help lists the commands" in terminal.seen
    terminal.send("/set max_tokens 30\r")
    terminal.wait_for(lines.PROMPT)
    terminal.send("你好\x7f们\\\r")  # one character taken back
    terminal.wait_for(lines.MORE)
    terminal.send("世界\r")
    terminal.wait_for(lines.PROMPT)
    assert max(len(line) for line in terminal.seen.replace(ERASE, "\n").replace("\x1b", "\n").splitlines()) <= 60
    terminal.send("\x03")
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.wait_for(lines.PROMPT)  # keys typed before it may meet a terminal that does not edit yet: Ctrl-D is lost there
    terminal.send("/sta\t\r")
    assert "1 turn, " in terminal.wait_for("last answer")
    terminal.wait_for(lines.PROMPT)
    terminal.send("\x04")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
    history = shell.folder / "home" / "chat_history"
    assert history.read_text("utf-8").splitlines() == ["/set max_tokens 30", "你们\\", "世界", "/stats"]
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_the_answer_not_the_program(terminal: Terminal) -> None:
    for _ in range(2):
        terminal.send("go on\r")
        terminal.wait_for("\n", count=4)  # of an answer without an end
        terminal.send("\x03" * 3)  # pressed again before anything happens
        terminal.wait_for("(stopped)")
        terminal.wait_for(lines.PROMPT)
    terminal.send("/stats\r")
    terminal.wait_for("2 turns, ")
    terminal.wait_for(lines.PROMPT)
    terminal.send("/exit\r")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
