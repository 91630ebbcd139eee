"""Command ask: answer questions from a folder of documents."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, SamplingOptions, TemplateName, check, with_groups
from headrace.cli.output import say
from headrace.cli.terminal import AnswerWriter
from headrace.data.progress import counted

# Most names in a note about skipped files.
SHOWN = 5
# Default of --max-tokens.
ANSWER = 256
DRAWN = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_n_sigma", "xtc_probability", "mirostat_tau", "seed")


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "budget passages preset temperature top_p max_tokens seed",
        ('headrace ask MODEL docs "How are models loaded?"', "An answer, and the passages it cites."),
    )
    app.command(cls=short)(with_groups(ask))


def ask(
    model: ModelName,
    sampling: SamplingOptions,
    options: ModelOptions,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="Folder with text files, at any depth.")
    ],
    questions: Annotated[list[str], typer.Argument(metavar="QUESTION", help="One or more questions.")],
    budget: Annotated[int, typer.Option(min=1, help="Most tokens of documents in a prompt.")] = 1024,
    passages: Annotated[int, typer.Option(min=1, help="Most passages in a prompt.")] = 8,
    chat_template: TemplateName = None,
) -> None:
    """Answer questions from the documents of a folder (BM25 retrieval), and list the cited passages.

    Passages stand in the order of the documents, so prompts start alike and the prefix cache helps; the share of cached prompt
    tokens is printed. Answers are greedy unless a sampling option is given, and have at most 256 tokens unless --max-tokens is
    given. Needs the extra `ground`.
    """
    from headrace.workflows.grounding import asking
    from headrace.workflows.grounding.documents import left_out, not_utf8, read_folder
    from headrace.workflows.grounding.retrieval import Index

    check(options, sampling)
    given = sampling.changes()
    own: dict[str, float] = {} if "max_tokens" in given else {"max_tokens": ANSWER}
    if sampling.preset is None and not any(name in given for name in DRAWN):
        own["temperature"] = 0.0
    index = Index(read_folder(folder))
    _say_files("not read, because they are not text or larger than 2 MiB", left_out(folder))
    _say_files("not UTF-8, read with unreadable characters replaced", not_utf8(folder))
    llm = open_llm(model, options, chat_template=chat_template, preset="offline")
    params = sampling.bind(llm)(**own)
    answers = asking.begin(llm, index, questions, params, budget=budget, most=passages, chat_template=chat_template)
    for answer in answers:
        if len(answers) > 1:
            print(f"> {answer.question}")
        writer = AnswerWriter(wrapped=True)
        for text in asking.follow(llm, answer):
            writer.write(text)
        writer.close()
        for passage in answer.cited:
            print(_citation(answer, passage))
        print()
        if not answer.passages:
            say("(no passage fits the question and --budget: the answer is the model's alone)")
        elif not answer.cited:
            places = ", ".join(_citation(answer, passage) for passage in answer.passages)
            say(f"(the answer cites none of its passages; they were {places})")
        if answer.output.outputs[0].finish_reason == "length":
            say("(the answer is cut off; --max-tokens allows more)")
    names = sorted({passage.source for answer in answers for passage in answer.passages})
    say(f"{counted(len(index.passages), 'passages')}; looked at {', '.join(names) or 'none'}")
    prompts = sum(len(answer.output.prompt_token_ids) for answer in answers)
    say(f"{asking.hit_rate(answers):.0%} of {prompts} prompt tokens were cached")


def _citation(answer: Any, passage: Any) -> str:
    """Return a passage with its number in the answer: "[1] mill.txt:3"."""
    return f"[{answer.passages.index(passage) + 1}] {passage.source}:{passage.line}"


def _say_files(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        say(f"{what}: {', '.join(names[:SHOWN])}{more}")
