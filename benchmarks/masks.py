"""Grammar masks of JSON schemas, checked against instances of known validity: `python -m benchmarks.masks`.

The file has the form of maskbench, a schema and its instances a line:
{"id": …, "schema": {…}, "tests": [{"valid": true, "data": …}, …]}. An instance is accepted if the mask allows every token of
its JSON text up to an end. A mask fixes the order of an object's properties, which does not matter for validity, so other
orders are tried if the given one is refused. Keywords that need the finished text are checked afterwards.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.jsonl import read_lines
from headrace.cli.output import print_table, status
from headrace.data.structured import StructuredOutputs
from headrace.decoding.constrained import Constraint, ConstraintError, Grammars
from headrace.decoding.json_schema.prepare import late_keywords, prepare, read_schema, why_broken
from headrace.startup.loading import open_model
from headrace.text.tokenizer import Tokenizer

# Pieces of text that are tried to find an accepted order of one instance's properties.
TRIES = 600


@dataclass(slots=True)
class MaskResult:
    """Counts over a file.

    `served`: supported schemas, `alone` of them by the mask without a final check. `refused`: valid instances that were not
    accepted; `accepted`: invalid ones that were. `wrong`: ids of schemas with either.
    """

    schemas: int = 0
    served: int = 0
    alone: int = 0
    valid: int = 0
    refused: int = 0
    invalid: int = 0
    accepted: int = 0
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def measure_masks(
    path: Path,
    tokenizer: Tokenizer,
    most: int | None = None,
    done: Callable[[int], None] = lambda _: None,
    *,
    open_objects: bool = True,
) -> MaskResult:
    """Run the first `most` schemas of the file.

    open_objects: objects may have properties that the schema does not list; the server's default is False.
    Raises ValueError if the file has another form.
    """
    grammars = Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    # Processes the vocabulary, which is not part of a compilation.
    grammars.constraint(StructuredOutputs(json_object=True))
    result = MaskResult()
    for number, case in enumerate(islice(read_lines(path, {"schema", "tests"}, "maskbench"), most), 1):
        _run(case, grammars, tokenizer, result, open_objects)
        done(number)
    return result


def _run(case: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer, result: MaskResult, open_objects: bool) -> None:
    result.schemas += 1
    began = time.perf_counter()
    try:
        spec = StructuredOutputs(json=json.dumps(case["schema"]), open_objects=open_objects)
        start, late = grammars.constraint(spec), late_keywords(spec)
    except ConstraintError as error:
        result.reasons[str(error).removeprefix("the constraint cannot be compiled: ")[:60]] += 1
        return
    result.compile_s.append(time.perf_counter() - began)
    result.served += 1
    result.alone += not late
    began = time.perf_counter()
    start.masks()
    result.mask_s.append(time.perf_counter() - began)
    orders = _orders(prepare(read_schema(spec.json or "")).schema)
    for test in case["tests"]:
        taken = _Search(tokenizer, orders).accepts(start, test["data"])
        taken = taken and not (late and why_broken(spec, json.dumps(test["data"])))
        if test["valid"]:
            result.valid += 1
            result.refused += not taken
        else:
            result.invalid += 1
            result.accepted += taken
        if taken != test["valid"]:
            result.wrong.append(str(case.get("id")))


class _Search:
    """Searches for a JSON text of a value that a grammar accepts.

    Properties are tried in the orders of the schema's `properties`, unlisted ones last; then in any order.
    """

    def __init__(self, tokenizer: Tokenizer, orders: list[list[str]]) -> None:
        self._tokenizer = tokenizer
        self._orders = orders
        self._left = TRIES
        self._thorough = False

    def accepts(self, start: Constraint, value: Any) -> bool:
        for self._thorough in (False, True):
            self._left = TRIES
            end = self._push(start, json.dumps(value, ensure_ascii=False)) or self._value(start, value)
            if end is not None and end.whole:
                return True
        return False

    def _push(self, at: Constraint, text: str) -> Constraint | None:
        self._left -= 1
        if self._left < 0:
            return None
        at = at.copy()
        for token in self._tokenizer.encode(text, add_special=False, parse_special=False):
            at.push(token)
        return None if at.error else at

    def _value(self, at: Constraint | None, value: Any) -> Constraint | None:
        if at is None:
            return None
        if isinstance(value, dict) and value:
            return self._object(at, value)
        if isinstance(value, list) and value:
            for place, item in enumerate(value):
                at = self._push(at, ", " if place else "[") if at is not None else None
                at = self._value(at, item)
            return self._push(at, "]") if at is not None else None
        return self._push(at, json.dumps(value, ensure_ascii=False))

    def _object(self, at: Constraint, value: dict[str, Any]) -> Constraint | None:
        tried: list[list[str]] = []
        for order in self._orders:
            first = [name for name in order if name in value]
            names = first + [name for name in value if name not in first]
            if not first or names in tried:
                continue
            tried.append(names)
            end = self._in_order(at, value, names)
            if end is not None:
                return end
        return self._any_order(at, value, list(value), "{") if self._thorough or not tried else None

    def _in_order(self, at: Constraint, value: dict[str, Any], names: list[str]) -> Constraint | None:
        here: Constraint | None = at
        for place, name in enumerate(names):
            here = self._property(here, ", " if place else "{", name, value[name])
        return self._push(here, "}") if here is not None else None

    def _any_order(self, at: Constraint, value: dict[str, Any], names: list[str], before: str) -> Constraint | None:
        for name in names:
            here = self._property(at, before, name, value[name])
            if here is None:
                continue
            rest = [other for other in names if other != name]
            end = self._any_order(here, value, rest, ", ") if rest else self._push(here, "}")
            if end is not None:
                return end
        return None

    def _property(self, at: Constraint | None, before: str, name: str, value: Any) -> Constraint | None:
        if at is None:
            return None
        return self._value(self._push(at, f"{before}{json.dumps(name, ensure_ascii=False)}: "), value)


def _orders(schema: Any) -> list[list[str]]:
    """Property names of each `properties` of a schema, in its order, and of all of them together."""
    found = list(_named(schema))
    return [*found, list(dict.fromkeys(name for names in found for name in names))]


def _named(schema: Any) -> Iterator[list[str]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield list(schema["properties"])
        for part in schema.values():
            yield from _named(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _named(part)


def masks(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Schemas and instances, a JSON object a line (maskbench's form).", exists=True),
    ],
    model: Annotated[str, typer.Option(help="The model whose vocabulary is used.")],
    most: Annotated[int | None, typer.Option(min=1, help="Only so many schemas.")] = None,
    closed_objects: Annotated[
        bool, typer.Option("--closed-objects", help="Objects get only the properties that their schema lists, as by default.")
    ] = False,
) -> None:
    """How many JSON schemas can be held to, whether valid instances pass and invalid ones do not, and what a mask costs."""
    tokenizer, progress = open_model(model).tokenizer, status()
    with file.open("rb") as lines:
        progress.start("reading schemas", min(sum(1 for _ in lines), most or sys.maxsize), unit="schemas")
    result = measure_masks(file, tokenizer, most, lambda _: progress.advance(1), open_objects=not closed_objects)
    share = lambda count, of: f"{count} of {of} ({count / max(of, 1):.1%})"  # noqa: E731
    rows = [
        ("schemas served", share(result.served, result.schemas)),
        ("by the mask alone", share(result.alone, result.schemas)),
        ("valid instances refused", share(result.refused, result.valid)),
        ("invalid instances accepted", share(result.accepted, result.invalid)),
        ("compilation, median and slowest", _times(result.compile_s)),
        ("first mask, median and slowest", _times(result.mask_s)),
    ]
    print_table(("", ""), rows)
    for reason, count in result.reasons.most_common():
        print(f"not served: {count} × {reason}")
    if result.wrong:
        print(f"wrong: {', '.join(dict.fromkeys(result.wrong))}")


def _times(seconds: list[float]) -> str:
    ordered = sorted(seconds) or [0.0]
    return f"{ordered[len(ordered) // 2] * 1e3:.2f} ms, {ordered[-1] * 1e3:.1f} ms"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (("schemas.jsonl --model smollm2-135m", "Schemas and instances, an object a line."),)
    return run(masks, "masks", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
