"""Answers from documents: planted facts are found, the order is stable, and the prefix cache hits."""

import re
import sys
from pathlib import Path

import pytest

from headrace.cli.terminal import CONTROLS
from headrace.data.outputs import CompletionOutput, RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.types import RequestMetrics
from headrace.llm import LLM
from headrace.workflows.grounding import asking
from headrace.workflows.grounding.asking import Answer, ask, begin, follow, hit_rate
from headrace.workflows.grounding.documents import Passage, pack, read_folder, shown, split
from headrace.workflows.grounding.retrieval import Index, words
from tests.cli_shell import Shell

pytest.importorskip("bm25s", reason="needs the extra ground")

FACTS = {
    "What is the door code of the boathouse?": ("The door code of the boathouse is 4417.", "house/boat.md"),
    "Who repaired the northern sluice?": ("The northern sluice was repaired by Ada Brook.", "works/sluice.txt"),
    "When does the ferry to Linden leave?": ("The ferry to Linden leaves at 06:40.", "travel.md"),
    "水车有多少叶片？": ("旧水车一共有二十四片叶片。", "中文.md"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four planted facts among forty paragraphs of other things."""
    root = tmp_path_factory.mktemp("documents")
    for number in range(8):
        noise = "\n\n".join(
            f"Note {number}.{i}: the river was {'high' if i % 2 else 'low'} and the mill stood." for i in range(5)
        )
        (root / f"notes{number}.md").write_text(noise)
    for text, name in FACTS.values():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"# About\n\nSome other words.\n\n{text}\n")
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / ".hidden.md").write_text("The door code of the boathouse is 0000.")
    return root


@pytest.mark.parametrize("question", FACTS)
def test_search_returns_planted_facts(folder: Path, question: str) -> None:
    best = Index(read_folder(folder)).search(question, 3)[0]
    text, name = FACTS[question]
    assert text in best.text
    assert best.source == name
    lines = (folder / name).read_text().splitlines()
    assert "\n".join(lines[best.line - 1 :]).startswith(best.text.splitlines()[0])


def test_search_for_an_unknown_word_returns_nothing(folder: Path) -> None:
    index = Index(read_folder(folder))
    assert index.search("zebra xylophone") == []
    assert all("0000" not in passage.text for passage in index.passages)  # hidden files are nobody's business


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no text files"):
        read_folder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "nowhere")


def test_passages_keep_every_word_and_their_line_number() -> None:
    text = "one\n\ntwo two\ntwo\n\n" + "long " * 100 + "\n\n" + "\n".join(f"line {i}" for i in range(80))
    passages = split("a.txt", text, 200)
    assert "".join(re.findall(r"\S+", " ".join(p.text for p in passages))) == "".join(text.split())
    assert max(len(p.text) for p in passages) <= 200
    for passage in passages:
        first = passage.text.splitlines()[0]
        assert first[:20] in text.splitlines()[passage.line - 1]
    assert words("Über die Mühle, 水车!") == ["über", "die", "mühle", "水", "车"]


def test_packing_takes_the_best_that_fit_in_the_order_of_the_documents() -> None:
    passages = [Passage("c", 1, "x" * 50), Passage("a", 9, "y" * 400), Passage("a", 1, "z" * 50), Passage("b", 1, "w" * 50)]
    kept = pack(passages, 150, len)
    assert kept == [Passage("a", 1, "z" * 50), Passage("c", 1, "x" * 50)]  # not the long one, and b came too late
    assert sum(len(shown(i, p)) for i, p in enumerate(kept, 1)) <= 150
    assert pack(list(reversed(passages)), 10_000, len) == pack(passages, 10_000, len) == sorted(passages)


def test_the_answer_changes_with_the_document_and_the_cache_hits(folder: Path, tiny_llm: LLM, tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    facts.mkdir()
    (facts / "a.md").write_text("The code is 4417.\n\n" + "The mill wheel turns. " * 6)
    params = SamplingParams(temperature=0.0, max_tokens=4)
    questions = ["What is the code of the mill?", "How does the wheel of the mill turn?"]
    before = ask(tiny_llm, Index(read_folder(facts)), questions, params, budget=200)
    again = ask(tiny_llm, Index(read_folder(facts)), questions, params, budget=200)
    assert before[0].passages == before[1].passages
    rate = hit_rate(again)
    print(f"prefix hit rate {rate:.0%}")
    assert rate > 0.8
    (facts / "a.md").write_text("The code is 9981.\n\n" + "The mill wheel turns. " * 6)
    after = ask(tiny_llm, Index(read_folder(facts)), questions, params, budget=200)
    assert "9981" in tiny_llm.tokenizer.decode(after[0].output.prompt_token_ids)
    assert "4417" not in tiny_llm.tokenizer.decode(after[0].output.prompt_token_ids)


def test_citations_are_spans_of_the_documents() -> None:
    passages = [Passage("a.md", 3, "one"), Passage("b.md", 1, "two")]
    output = RequestOutput("r", None, [1], None, [CompletionOutput(0)], RequestMetrics())
    answer = Answer("?", passages, output)
    assert answer.cited == []
    output.outputs[0].text = "It is two [2], see [2] and [7]."
    assert answer.cited == [passages[1]]


def test_answers_stream_while_others_are_computed(folder: Path, tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    questions = list(FACTS)[:2]
    first, second = begin(tiny_llm, Index(read_folder(folder)), questions, params, budget=60)
    pieces = list(follow(tiny_llm, first))
    assert len(pieces) > 1
    assert second.text  # they are one batch
    assert "".join(follow(tiny_llm, second)) == second.text
    whole = ask(tiny_llm, Index(read_folder(folder)), questions, params, budget=60)
    assert ["".join(pieces), second.text] == [answer.text for answer in whole]


def test_the_six_tasks_have_prompts_that_begin_alike(tiny_llm: LLM) -> None:
    passages = [Passage("a.md", 1, "The code is 4417.")]
    made = [
        (asking.translation("水车", "English"), asking.translation("河", "English"), "水车"),
        (asking.summary("Long text."), asking.summary("Other."), "Long text."),
        (asking.document_qa(passages, "What?"), asking.document_qa(passages, "Who?"), "4417"),
        (
            asking.chat([("hi", "hello")], "and now?", "Be brief."),
            asking.chat([("hi", "hello")], "what?", "Be brief."),
            "hello",
        ),
        (asking.code_edit("x = 1", "rename x"), asking.code_edit("y = 2", "rename y"), "x = 1"),
        (asking.transcript("um so yes"), asking.transcript("well"), "um so yes"),
    ]
    for one, other, needed in made:
        assert needed in str(one)
        a, b = tiny_llm.render(one), tiny_llm.render(other)
        common = next(i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1])
        assert common > 5  # all up to what differs is in the cache after the first
        assert one[0] == other[0]


def test_ask(shell: Shell, tiny_gguf: Path, folder: Path) -> None:
    code, out, err = shell("ask", tiny_gguf, folder, *list(FACTS)[:2], "-t", "0", "-m", "8", "--budget", "150")
    assert code == 0, err
    assert out.count("> ") == 2
    assert "house/boat.md" in err
    assert "works/sluice.txt" in err
    assert re.search(r"\d+% of \d+ prompt tokens were cached", err)


def test_an_answer_of_ask_breaks_between_words(
    shell: Shell, tiny_gguf: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("ask", tiny_gguf, folder, next(iter(FACTS)), "-t", "0", "-m", "48", "--budget", "150")
    plain = shell(*asked)[1]
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    wrapped = shell(*asked)[1]
    assert wrapped.split() == plain.translate(CONTROLS).split()
    assert wrapped.count("\n") > plain.count("\n")


def test_ask_lists_unread_files_and_answers_without_passages(shell: Shell, tiny_gguf: Path, folder: Path) -> None:
    (folder / "picture.png").unlink()
    clean = shell("ask", tiny_gguf, folder, next(iter(FACTS)), "-m", "1", "--budget", "150")[2]
    assert "not read" not in clean
    assert "the model's alone" not in clean
    (folder / "works" / "plan.pdf").write_bytes(b"%PDF")
    (folder / ".hidden.pdf").write_bytes(b"%PDF")
    code, _, err = shell("ask", tiny_gguf, folder, "zyzzyva qwxv", "-m", "1", "--budget", "150")
    assert code == 0, err
    assert "not read, because they are not text or larger than 2 MiB: works/plan.pdf\n" in err
    assert "(no passage fits the question and --budget: the answer is the model's alone)" in err


def test_a_question_that_shares_only_stop_words_finds_nothing(folder: Path) -> None:
    index = Index(read_folder(folder))
    assert any("the" in words(passage.text) for passage in index.passages)  # the control: it shares a word
    assert index.search("What is the capital of Peru?") == []
    assert index.search("the of is") != []  # a question without other words is answered by what there is
    assert index.search("What is the door code?") != []


def test_ask_lists_the_passages_of_an_answer_without_citation(shell: Shell, tiny_gguf: Path, folder: Path) -> None:
    _, out, err = shell("ask", tiny_gguf, folder, next(iter(FACTS)), "-t", "0", "-m", "4", "--budget", "150")
    assert "house/boat.md" not in out  # the tiny model cites nothing
    assert re.search(r"cites none of its passages; they were \[1\] house/boat\.md:\d+", err)
    _, _, err = shell("ask", tiny_gguf, folder, "What is the capital of Peru?", "-m", "1", "--budget", "150")
    assert "the answer is the model's alone" in err


def test_ask_names_a_file_that_is_not_utf8(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("The mill stands by the river.")
    (tmp_path / "latin.txt").write_bytes("Die Mühle steht am Fluß.".encode("latin-1"))
    _, _, err = shell("ask", tiny_gguf, tmp_path, "Where is the mill?", "-m", "1", "--budget", "150")
    assert "not UTF-8, read with unreadable characters replaced: latin.txt\n" in err


def test_ask_is_greedy_and_bounded_by_default(shell: Shell, tiny_gguf: Path, folder: Path) -> None:
    question = next(iter(FACTS))
    one, again = (shell("ask", tiny_gguf, folder, question, "--budget", "60")[1] for _ in range(2))
    assert one == again == shell("ask", tiny_gguf, folder, question, "--budget", "60", "-t", "0", "-m", "256")[1]
    assert one != shell("ask", tiny_gguf, folder, question, "--budget", "60", "-t", "1", "--seed", "4", "-m", "256")[1]
    _, _, err = shell("ask", tiny_gguf, folder, question, "--budget", "60", "-m", "3")
    assert "cut off" in err
