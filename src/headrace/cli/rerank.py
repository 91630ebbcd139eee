"""Command rerank: documents in the order of their relevance to a query, one JSON line each."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import texts_of
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, WeightOptions, with_groups
from headrace.cli.output import json_text, status


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "file top max_model_len threads",
        ('headrace rerank MODEL "water power" "a mill" "tax law"', "The documents, best first, a JSON line each."),
        ('headrace rerank MODEL "water power" --file texts.txt --top 3', "The three best lines of a file."),
    )
    app.command(cls=short)(with_groups(rerank))


def rerank(
    model: ModelName,
    options: WeightOptions,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[DOCUMENTS]...", help="Documents (default: the lines of --file or stdin).")
    ] = None,
    file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with one document per line.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Number of documents to print (default: all).")] = None,
) -> None:
    """Rank documents by their relevance to a query, best first: one JSON line each, {"index", "score", "tokens", "text"}.

    Works with rerankers: cross-encoders with one label, and Qwen3-Reranker.
    """
    options.check()
    given = texts_of(texts, file)
    llm = open_llm(model, options)
    status().finish()
    for one in llm.rank(query, given, top_n=top):
        line = {"index": one.index, "score": one.score, "tokens": len(one.token_ids), "text": given[one.index]}
        print(json_text(line), flush=True)
