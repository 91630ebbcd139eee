"""Tool calls on cases with known answers of the Berkeley Function Calling Leaderboard: `python -m benchmarks.tool_calls`.

A case (simple_python) is a question and one Python function, whose types are normalised to JSON Schema. Prompt and parsing are
those of the server: tools go through the chat template. Each case runs twice, constrained by the call's grammar
(`tool_choice: required`) and free. A call is valid if it has the function's name and its arguments fit the schema, and right if
the arguments are also a known answer. `loose` counts free answers by their first JSON object that could be a call, for models
that omit the template's tags.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import typer

from benchmarks.command import run
from benchmarks.jsonl import read_lines
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, writable
from headrace.cli.output import print_table
from headrace.cli.output import say as print_line
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.decoding.tools import Tooling, conversation, tooling
from headrace.llm import LLM
from headrace.server.protocols.fields import ChatRequest
from headrace.text.dialects.call_parser import CallFormat, CallParser

# JSON Schema types by the names of the data set.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
WAYS = ("constrained", "free", "loose")
ANSWERS = "simple_python.answers.json"
# Differences between texts that do not count.
PUNCTUATION = str.maketrans("'", '"', " ,./-_*^")


@dataclass(frozen=True, slots=True)
class Case:
    """One question. `answers`: accepted values by argument; "" among them if the argument may be missing."""

    id: str
    messages: list[dict[str, Any]]
    name: str
    tool: dict[str, Any]
    answers: dict[str, list[Any]]

    @property
    def schema(self) -> dict[str, Any]:
        return dict(self.tool["function"]["parameters"])


@dataclass(slots=True)
class ToolResult:
    """Counts of one mode. `cut`: answers that reached the token limit. `invalid`: ids; `texts`: answers by id."""

    cases: int = 0
    called: int = 0
    valid: int = 0
    right: int = 0
    cut: int = 0
    tokens: int = 0
    seconds: float = 0.0
    invalid: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def read_cases(path: Path, answers: Path | None = None, most: int | None = None) -> list[Case]:
    """The first `most` cases of a file. answers: file of known answers, by default ANSWERS in the same folder.

    Raises ValueError.
    """
    answers = path.with_name(ANSWERS) if answers is None else answers
    if not answers.is_file():
        raise ValueError(f"there are no known answers at {answers}; give the file with --answers")
    known = {line["id"]: line["ground_truth"] for line in read_lines(answers, {"id", "ground_truth"}, "BFCL")}
    cases: list[Case] = []
    for line in islice(read_lines(path, {"id", "question", "function"}, "BFCL"), most):
        (function,), (messages,) = line["function"], line["question"]
        if line["id"] not in known:
            raise ValueError(f"{answers} has no answer to {line['id']}; give the answers that belong to {path.name}")
        tool = {"type": "function", "function": {**function, "parameters": json_schema(function["parameters"])}}
        (answer,) = known[line["id"]]
        cases.append(Case(line["id"], messages, function["name"], tool, answer[function["name"]]))
    return cases


def measure_tools(
    llm: LLM,
    cases: list[Case],
    *,
    at_once: int = 32,
    max_tokens: int = 1024,
    penalty: float = 1.0,
    say: Callable[[str], None] = print,
) -> dict[str, ToolResult]:
    """Run every case constrained and free, greedily, `at_once` cases at a time.

    No grammar ends a list without a bound in its schema, so an answer that reaches the limit is not valid.
    """
    asked = SamplingParams(temperature=0.0, max_tokens=max_tokens, repetition_penalty=penalty)
    results = {way: ToolResult() for way in WAYS}
    for begin in range(0, len(cases), at_once):
        group = [(case, *_asked(llm, case)) for case in cases[begin : begin + at_once]]
        for held in (True, False):
            settings = [asked.replace(structured_outputs=given.spec) if held else asked for _, given, _ in group]
            began = time.perf_counter()
            outputs = llm.generate([prompt for _, _, prompt in group], settings)
            seconds = time.perf_counter() - began
            for way in WAYS[:1] if held else WAYS[1:]:
                results[way].seconds += seconds
                for (case, given, _), output in zip(group, outputs, strict=True):
                    text = output.outputs[0].text
                    _count(results[way], case, output, loose_call(text) if way == "loose" else calls_of(given.form, text))
        done = ", ".join(f"{way} {result.valid} valid, {result.right} right" for way, result in results.items())
        say(f"{results['free'].cases} of {len(cases)}: {done}")
    return results


def calls_of(form: CallFormat, text: str) -> list[tuple[str, str]]:
    """Name and arguments (JSON text) of each call in an answer, by the server's parser."""
    reader = CallParser(form)
    calls: list[tuple[str, str]] = []
    for piece in reader.push(text) + reader.close():
        if piece.name is not None:
            calls.append((piece.name, ""))
        if piece.call is not None:
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return calls


def loose_call(text: str) -> list[tuple[str, str]]:
    """The first JSON object of a text that has a name and arguments, with or without tags."""
    at = text.find("{")
    while at >= 0:
        try:
            found, _ = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            found = None
        if isinstance(found, dict) and isinstance(found.get("name"), str) and {"arguments", "parameters"} & set(found):
            return [(found["name"], json.dumps(found.get("arguments", found.get("parameters"))))]
        at = text.find("{", at + 1)
    return []


def json_schema(kind: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a Python function's parameters; the data set names types dict, float, tuple and any."""
    made = {key: value for key, value in kind.items() if key not in ("type", "optional")}
    if kind.get("type") != "any":
        made["type"] = TYPES.get(kind["type"], kind["type"])
    if "properties" in made:
        made["properties"] = {name: json_schema(each) for name, each in made["properties"].items()}
    if "items" in made:
        made["items"] = json_schema(made["items"])
    return made


def is_right(given: Any, answers: dict[str, list[Any]]) -> bool:
    """Whether the arguments equal a known answer; optional ones may be missing, others may not be added."""
    if not isinstance(given, dict) or set(given) - set(answers):
        return False
    return all(_is_one_of(given[name], values) if name in given else "" in values for name, values in answers.items())


def _is_one_of(given: Any, values: list[Any]) -> bool:
    return any(_same(given, value) for value in values)


def _same(given: Any, value: Any) -> bool:
    """Whether two values are equal. Ignores case, blanks and most punctuation of texts, and the type of numbers."""
    match value:
        case str():
            return isinstance(given, str) and _plain(given) == _plain(value)
        case bool() | None:
            return given is value
        case list():
            return isinstance(given, list) and len(given) == len(value) and all(map(_same, given, value))
        case dict():
            return is_right(given, {name: each if isinstance(each, list) else [each] for name, each in value.items()})
    return isinstance(given, (int, float)) and not isinstance(given, bool) and given == value


def _plain(text: str) -> str:
    return text.lower().translate(PUNCTUATION)


def _count(result: ToolResult, case: Case, output: RequestOutput, calls: list[tuple[str, str]]) -> None:
    (one,) = output.outputs
    result.cases += 1
    result.tokens += len(one.token_ids)
    result.cut += one.finish_reason == "length"
    result.texts[case.id] = one.text
    result.called += bool(calls)
    arguments = [_loaded(text) for _, text in calls]
    valid = bool(calls) and all(
        name == case.name and jsonschema.Draft202012Validator(case.schema).is_valid(each)
        for (name, _), each in zip(calls, arguments, strict=True)
    )
    result.valid += valid
    result.right += valid and len(calls) == 1 and is_right(arguments[0], case.answers)
    if not valid:
        result.invalid.append(case.id)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        # Fits no schema of arguments, which are objects.
        return None


def _asked(llm: LLM, case: Case) -> tuple[Tooling, list[int]]:
    """Tools and prompt token ids of a case, as the server builds them."""
    request = ChatRequest(
        model="", messages=case.messages, tools=[case.tool], tool_choice="required", parallel_tool_calls=False
    )
    template = llm.opened.template.choose(tools=True).source
    given = tooling(request, template, llm.tokenizer.control_id)
    assert given is not None
    variables: dict[str, Any] = {"tools": given.tools} if given.in_template else {}
    return given, llm.render(conversation(case.messages, given, template), **variables)


# Names of invalid cases that are printed; the JSON file has all.
SHOWN = 10


def tools(
    model: ModelName,
    options: ModelOptions,
    data: Annotated[Path, typer.Option(help="Questions and functions: BFCL's simple_python.", exists=True, dir_okay=False)],
    answers: Annotated[
        Path | None, typer.Option(help="Their known answers (default: simple_python.answers.json beside it).", dir_okay=False)
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="Only so many cases.")] = None,
    at_once: Annotated[int, typer.Option(min=1, max=256, help="Cases in the batching loop at a time.")] = 32,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 1024,
    penalty: Annotated[float, typer.Option("--repetition-penalty", help="Above 1 ends lists that repeat for ever.")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """How many tool calls fit their schema, and how many are right, with the calls' grammar and without.

    Each case is asked as the server asks it, greedily. Valid: the function's name, and arguments that fit its schema. Right:
    these arguments are among the known answers. Loose: free, and a JSON object anywhere in the text counts as its call.
    """
    cases = read_cases(data, answers, most)
    llm: Any = open_llm(model, options, max_num_seqs=at_once)
    results = measure_tools(llm, cases, at_once=at_once, max_tokens=max_tokens, penalty=penalty, say=print_line)
    print_table(
        ("", "called", "valid", "right", "cut off", "tokens", "tokens/s"), [_row(way, one) for way, one in results.items()]
    )
    for way, one in results.items():
        if one.invalid:
            more = f" and {len(one.invalid) - SHOWN} more" if len(one.invalid) > SHOWN else ""
            print(f"not valid, {way}: {', '.join(one.invalid[:SHOWN])}{more}")
    if json_file is not None:
        json_file.write_text(json.dumps({way: one.plain() for way, one in results.items()}, indent=2) + "\n", "utf-8")


def _row(way: str, one: Any) -> tuple[str, ...]:
    share = lambda count: f"{count} of {one.cases} ({count / max(one.cases, 1):.1%})"  # noqa: E731
    speed = f"{one.tokens / max(one.seconds, 1e-9):.1f}"
    return (way, share(one.called), share(one.valid), share(one.right), str(one.cut), str(one.tokens), speed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (("MODEL --data BFCL_v4_simple_python.json --most 50", "Fifty questions, held and free."),)
    return run(tools, "tool_calls", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
