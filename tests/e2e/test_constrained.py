"""Outputs held to a grammar: what comes out fits, on both back ends, whatever else is asked for; in doubt nothing comes."""

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from headrace.cli.app import main
from headrace.data.params import ParamError, SamplingParams, StructuredOutputs
from headrace.decoding.constrained import Constraint
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.speculation import Speculation
from headrace.engine import engine
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.runner.span import Span
from headrace.startup import selfdraft
from tests.tiny_files import write_tiny_gguf

SCHEMA = {
    "type": "object",
    "properties": {
        "wheel": {"enum": ["mill", "stone", "水車", 'a "b" \\ \n']},
        "turns": {"type": "integer", "minimum": -5, "maximum": 12},
        "wet": {"type": "boolean"},
        "parts": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,4}$"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["wheel", "turns", "wet", "parts"],
    "additionalProperties": False,
}
REGEX = r"(mill|stone) [0-9]{2,4}(\.[0-9])?!"
CHOICE = ("yes", "yes, please", "no", 'a"b', "c\\d", "e/f", "x\ny", "水車", "\x7f", "(.*)")
LARK = 'start: item ("+" item){1,3}\nitem: /[0-9]{1,2}/ | "(" start ")"'
GBNF = 'root ::= "mill" rest\nrest ::= ("-" [a-d] [0-9]) | "!"'


def is_json(text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def is_sum(text: str) -> bool:
    """Sums of two to four numbers, or of such sums in brackets: the innermost are reduced until one number is left."""
    while re.search("[(]", text):
        shorter = re.sub(r"[(][0-9]{1,2}([+][0-9]{1,2}){1,3}[)]", "1", text)
        if shorter == text:
            return False
        text = shorter
    return re.fullmatch(r"[0-9]{1,2}([+][0-9]{1,2}){1,3}", text) is not None


CASES: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": SCHEMA}, is_json),
    "compact": ({"json": SCHEMA, "disable_any_whitespace": True}, lambda text: is_json(text) and "\n" not in text[:2]),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": CHOICE}, lambda text: text in CHOICE),
    "gbnf": ({"grammar": GBNF}, lambda text: re.fullmatch("mill(-[a-d][0-9]|!)", text) is not None),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("constrained") / "tiny.gguf")


@pytest.fixture(scope="module", params=["torch", "native"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    dtype = {"dtype": "float64"} if request.param == "torch" else {}
    opened = LLM(model, backend=request.param, threads=1, device="cpu", seed=1, **dtype)
    yield opened
    opened.close()


def params(constraint: dict[str, Any], **more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "structured_outputs": constraint, **more})


SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.5, "seed": 1},
    {"temperature": 1.0, "seed": 2, "n": 4},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 3},
    {"temperature": 1.0, "typical_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 4},
    {"temperature": 1.0, "seed": 5, "ignore_eos": True},
    {"temperature": 0.0, "logprobs": 3, "logprobs_mode": "processed"},
)


@pytest.mark.parametrize("kind", CASES)
def test_every_output_fits(llm: LLM, kind: str) -> None:
    constraint, fits = CASES[kind]
    jobs = [params(constraint, **setting) for setting in SETTINGS]
    for output in llm.generate(["The mill"] * len(jobs), jobs):
        assert output.error is None
        for one in output.outputs:
            assert one.finish_reason == "stop", one.text
            assert fits(one.text), one.text
    (free,) = llm.generate("The mill", params(constraint).replace(structured_outputs=None))
    assert not fits(free.outputs[0].text)  # it does not come by itself


def test_recursive_grammars(llm: LLM) -> None:
    (output,) = llm.generate("The mill", params({"grammar": LARK}, n=8, temperature=1.0, seed=1, max_tokens=100))
    ended = [one for one in output.outputs if one.finish_reason == "stop"]
    assert ended
    assert all(is_sum(one.text) for one in ended)


def test_any_json_object(llm: LLM) -> None:
    (output,) = llm.generate("The mill", params({"json_object": True}, n=8, temperature=1.0, seed=4, max_tokens=200))
    ended = [one.text for one in output.outputs if one.finish_reason == "stop"]
    assert all(one.text.startswith("{") for one in output.outputs)
    assert all(isinstance(json.loads(text), dict) for text in ended)


def test_outputs_alone_equal_those_in_a_batch(llm: LLM) -> None:
    """Constrained and free requests in one batch, with little room: each output is what it is alone."""
    jobs = [params(CASES[kind][0], temperature=1.2, seed=7, max_tokens=40) for kind in CASES]
    jobs += [SamplingParams(temperature=1.0, seed=9, max_tokens=20)]
    alone = [llm.generate("The mill", job)[0].outputs[0].token_ids for job in jobs]
    together = llm.generate(["The mill"] * len(jobs), jobs)
    assert [output.outputs[0].token_ids for output in together] == alone


def test_preempted_and_resumed(model: Path) -> None:
    roomy = LLM(model, backend="torch", dtype="float64", threads=1, device="cpu")
    tight = LLM(model, backend="torch", dtype="float64", threads=1, device="cpu", kv_cache_memory=16 * 2 * 2 * 32 * 8 * 14)
    jobs = [params({"json": SCHEMA}, temperature=1.0, seed=seed, max_tokens=90) for seed in range(6)]
    expected = [output.outputs[0].token_ids for output in roomy.generate(["The mill stands"] * 6, jobs)]
    found = [output.outputs[0].token_ids for output in tight.generate(["The mill stands"] * 6, jobs)]
    assert tight.engine.scheduler.preemptions > 0
    assert found == expected


def test_streamed(llm: LLM) -> None:
    job = params({"json": SCHEMA}, temperature=0.0)
    (whole,) = llm.generate("The mill", job)
    deltas = list(llm.stream("The mill", job))
    assert "".join(delta.text for delta in deltas) == whole.outputs[0].text
    assert len(deltas) > 3


def test_the_end_token_is_not_waited_for(llm: LLM) -> None:
    """Where nothing can follow the output ends; where something can, the end token says so."""
    (fixed, open_) = llm.generate(
        ["The mill"] * 2, [params({"regex": "ab"}, temperature=0.0), params({"regex": "ab[0-9]*"}, temperature=2.0, seed=3)]
    )
    assert fixed.outputs[0].text == "ab"
    assert not set(fixed.outputs[0].token_ids) & llm.tokenizer.eos_ids
    assert re.fullmatch("ab[0-9]*", open_.outputs[0].text)


def test_stop_strings_and_lengths_still_hold(llm: LLM) -> None:
    (stopped, cut) = llm.generate(
        ["The mill"] * 2,
        [params({"regex": "abc;def"}, stop=[";"]), params({"regex": "[a-z]{40}"}, max_tokens=3)],
    )
    assert stopped.outputs[0].text == "abc"
    assert stopped.outputs[0].stop_reason == ";"
    assert cut.outputs[0].finish_reason == "length"


def test_raw_and_processed_logprobs(llm: LLM) -> None:
    """Raw ones are the model's own, processed ones those of what could come."""
    raw, processed = llm.generate(
        ["The mill"] * 2,
        [params({"regex": "(a|b)!"}, temperature=0.0, logprobs=5, logprobs_mode=mode) for mode in ("raw", "processed")],
    )
    (free,) = llm.generate("The mill", SamplingParams(temperature=0.0, logprobs=5, max_tokens=1))
    first = raw.outputs[0].logprobs or []
    assert first[0].top_ids == (free.outputs[0].logprobs or [])[0].top_ids
    allowed = {llm.tokenizer.id_of(text) for text in ("a", "b", "a!", "b!")}
    top = (processed.outputs[0].logprobs or [])[0]
    assert set(top.top_ids) <= allowed
    assert top.logprob > first[0].logprob


def test_keywords_without_a_mask_are_checked_at_the_end(llm: LLM) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    jobs = [params({"json": schema}, temperature=1.0, seed=seed) for seed in range(20)]
    outputs = llm.generate(["The mill"] * 20, jobs)
    for output in outputs:
        first, second = json.loads(output.outputs[0].text)
        assert (output.error is not None) == (first == second)
        assert output.outputs[0].finish_reason == ("error" if first == second else "stop")
    assert {output.error is None for output in outputs} == {True, False}


class Broken(Constraint):
    """Fails after three tokens."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.left = 3

    def push(self, token: int) -> None:
        self.left -= 1
        if self.left == 0:
            self.error = "the matcher died"
        super().push(token)


class Maskless(Constraint):
    """Says nothing of what may come."""

    def masks(self, *tree: Any) -> bytes:
        return b""


@pytest.mark.parametrize(("kind", "said"), [(Broken, "the matcher died"), (Maskless, "mask")])
def test_fails_closed(llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: type[Constraint], said: str) -> None:
    """A matcher that dies ends its request with an error, and no other."""
    made = llm.engine.grammars.constraint(StructuredOutputs(regex="[a-z]{20}"))  # type: ignore[union-attr]
    broken = kind(made._matcher, made._words)
    monkeypatch.setattr(engine, "constraint_of", lambda asked, *_: broken if asked.structured_outputs else None)
    bad, good = llm.generate(["The mill"] * 2, [params({"regex": "[a-z]{20}"}), SamplingParams(max_tokens=8, temperature=0)])
    assert said in (bad.error or "")
    assert bad.outputs[0].finish_reason == "error"
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 8
    llm.engine.check()


def test_nothing_left_to_draw_is_an_error(llm: LLM) -> None:
    (output,) = llm.generate("The mill", params({"regex": "ab"}, min_tokens=0, n=1))
    assert (output.error, output.outputs[0].text) == (None, "ab")  # the control: with nothing ruled out it is drawn
    banned = [t for t in range(llm.tokenizer.vocab_size) if llm.tokenizer.token_bytes(t) in (b"a", b"ab")]
    (output,) = llm.generate("The mill", params({"regex": "ab"}, bad_words=[[t] for t in banned]))
    assert "no token can be drawn" in (output.error or "")


@pytest.mark.parametrize(
    "constraint",
    [
        {"json": "{"},
        {"json": {"type": "strin"}},
        {"json": {"$ref": "https://example.com/x"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": False},
        {"regex": "("},
        {"regex": "(?=a)b"},
        {"grammar": "start: nothing"},
        {"grammar": "root ::= ("},
        {"regex": "(" * 100 + "a" + ")" * 100},
    ],
)
def test_invalid_grammars_are_refused(llm: LLM, constraint: dict[str, Any]) -> None:
    with pytest.raises(AdmissionError, match=r".{20}"):
        llm.generate("The mill", params(constraint))
    assert not llm.engine.busy


@pytest.mark.parametrize(
    "constraint",
    [{}, {"regex": "a", "choice": ["b"]}, {"choice": [""]}, {"choice": ["a"] * 5000}, {"regex": "a" * 300_000}, {"x": 1}, 5],
)
def test_invalid_constraints_are_refused(constraint: Any) -> None:
    with pytest.raises(ParamError, match=r".{15}"):
        SamplingParams(structured_outputs=constraint)


DRAFTED = [
    params(form, temperature=heat, seed=4, max_tokens=60, ignore_eos=True)
    for form in ({"regex": "((mill|stone) ){12}end"}, {"json": SCHEMA}, {"grammar": LARK}, {"regex": r"(.|\n)+"})
    for heat in (0.0, 1.0)
]
UNSURE = {"draft": DraftModel(least=0.0), "self": DraftModel("self", group=None, least=0.0)}
BACKENDS: dict[str, dict[str, Any]] = {"native": {}, "torch": {"dtype": "float64"}}


def drafted(model: Path, backend: str, **more: Any) -> tuple[list[list[int]], int]:
    """The tokens of DRAFTED's jobs, and how many were drafted."""
    opened = LLM(model, backend=backend, threads=1, device="cpu", kv_cache_memory="16MiB", **BACKENDS[backend], **more)
    if more["speculate"] in UNSURE:  # of a model of noise nothing is likely, and they would wait for what is
        opened.engine.speculation = Speculation([UNSURE[more["speculate"]]], 256, 3)
    try:
        outputs = opened.generate(["mill stone mill stone mill"] * len(DRAFTED), DRAFTED)
    finally:
        opened.close()
    assert [one.error for one in outputs] == [None] * len(DRAFTED)
    return [one.outputs[0].token_ids for one in outputs], sum(one.metrics.drafted for one in outputs)


@pytest.fixture(scope="module", params=BACKENDS)
def undrafted(request: pytest.FixtureRequest, model: Path) -> tuple[str, list[list[int]]]:
    """A back end, and its tokens without drafts."""
    tokens, drafts = drafted(model, request.param, speculate="off")
    assert drafts == 0
    return request.param, tokens


@pytest.mark.parametrize("kind", ["ngram", "suffix", "lookahead", "jacobi", "draft", "self"])
def test_with_drafts_as_without(
    undrafted: tuple[str, list[list[int]]], model: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are pruned by the grammar and verified under its masks: the same tokens, whoever drafts."""
    backend, expected = undrafted
    more: dict[str, Any] = {"speculate": kind, "draft_tokens": 3}
    if kind == "draft":
        more["draft"] = write_tiny_gguf(tmp_path / "draft.gguf")
    if kind == "self":
        monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
        selfdraft.save(model, Span(layers=1))
    tokens, drafts = drafted(model, backend, **more)
    assert tokens == expected
    assert drafts > 0


def test_from_the_command_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    lark = tmp_path / "sum.lark"
    lark.write_text('start: "a" ("b" | "c")')
    for option, fits in (
        (["--json-schema", str(schema)], is_json),
        (["--regex", "x[0-9]y"], lambda text: re.fullmatch("x[0-9]y", text) is not None),
        (["--grammar", str(lark)], lambda text: text in ("ab", "ac")),
        (["--choice", "wood", "--choice", "iron"], lambda text: text in ("wood", "iron")),
    ):
        assert main(["run", str(model), "The mill", "-m", "150", "--threads", "1", *option]) == 0
        assert fits(capsys.readouterr().out.strip())
    assert main(["run", str(model), "The mill", "--regex", "a", "--choice", "b"]) != 0


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "maximum": 150, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = ("Give me a person as JSON.", "Who is Ada Lovelace? Answer as JSON.", "Make up a user with a name and an age.", "a cat")


@pytest.mark.weights
def test_an_object_of_two_fields_is_whole_within_eighty_tokens(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and hot, of a small model. The control: where blanks are free, some are cut."""
    with LLM(default_model, threads=1, device="cpu", kv_cache_memory="256MiB") as llm:
        prompts = [llm.render([{"role": "user", "content": text}]) for text in ASKED]

        def reasons(title: str) -> set[str | None]:
            held = StructuredOutputs.of({"json": {"title": title, **PERSON}})  # compiled once each
            kinds = [
                SamplingParams(max_tokens=80, temperature=0.0, structured_outputs=held),
                SamplingParams(max_tokens=80, temperature=1.5, n=6, seed=3, structured_outputs=held),
            ]
            done = [answer for kind in kinds for answer in llm.generate(prompts, kind)]
            return {one.finish_reason for answer in done for one in answer.outputs}

        assert reasons("bounded") == {"stop"}
        monkeypatch.setattr("headrace.decoding.grammar.WHITESPACE", r"[ \t\r\n]+")
        assert reasons("free") == {"stop", "length"}
