"""translate: what an encoder-decoder writes from each text, a line each."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import texts_of
from headrace.cli.opening import look_at, open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.status import status
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.weights.progress import Silent

BATCH = 64  # texts handed over at a time


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "file beams max_tokens as_json threads",
        ('headrace translate MODEL "A dog runs on the grass."', "The translation."),
        ("headrace translate MODEL --beams 4 < in.txt > out.txt", "A line for each line."),
    )
    app.command(cls=short)(with_groups(translate))


def translate(
    model: ModelName,
    options: WeightOptions,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXTS]...", help="Texts; without any, the lines of --file or stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A text a line.")] = None,
    beams: Annotated[int, typer.Option(min=1, help="Beam search with so many beams; 1: the likeliest next token.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of a translation (default: what the context holds).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON line each: text, translation, tokens, finish_reason.")
    ] = False,
) -> int:
    """Write what an encoder-decoder (Marian, T5) makes of each text: one line each.

    An empty line stays one. T5 is told what to do by the text itself ("translate English to German: …").
    """
    options.check()
    given = texts_of(texts, file, blank=True)
    opened = look_at(model)
    if opened is None or opened.config.source is None:
        raise ValueError(f"{model} is no encoder-decoder, so it has no source to translate; headrace run asks a model for one")
    llm = open_llm(model, options)
    status().finish()
    most = llm.memory_plan.max_model_len - 1
    most = most if max_tokens is None else min(max_tokens, most)
    params = SamplingParams(temperature=0.0, max_tokens=most)
    searched = params if beams == 1 else BeamSearchParams(beam_width=beams, max_tokens=most)
    progress = Silent() if sys.stdout.isatty() else status()  # lines on the screen say enough
    progress.start("translating", len(given), unit="texts")
    for start in range(0, len(given), BATCH):
        part = given[start : start + BATCH]
        made = iter(llm.generate([text for text in part if text.strip()], searched))
        for text in part:
            print(_line(text, next(made) if text.strip() else None, as_json), flush=True)
        progress.advance(len(part))
    progress.finish()
    return 0


def _line(text: str, output: Any, as_json: bool) -> str:
    """What is printed of a text and its output, None where it is blank. Raises ValueError for one that failed."""
    if output is not None and output.error is not None:
        raise ValueError(f"{text[:60]!r} cannot be translated: {output.error}")
    one = None if output is None else output.outputs[0]
    translation = "" if one is None else one.text.strip().replace("\n", " ")
    if not as_json:
        return translation
    more = {"tokens": 0 if one is None else len(one.token_ids), "finish_reason": None if one is None else one.finish_reason}
    return json.dumps({"text": text, "translation": translation, **more}, ensure_ascii=False)
