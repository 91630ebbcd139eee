"""Command run: one answer to one prompt."""

from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.inputs import join_prompt
from headrace.cli.interrupt import INTERRUPTED, Interrupt
from headrace.cli.opening import open_llm
from headrace.cli.options import (
    ChoiceOptions,
    ModelName,
    ModelOptions,
    SamplingOptions,
    ShowExits,
    SystemPrompt,
    TemplateName,
    check,
    with_groups,
)
from headrace.cli.output import json_text, moving, watch_prompt
from headrace.cli.terminal import AnswerWriter, note


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "file system raw n as_json quiet preset temperature top_p max_tokens seed json_schema draft max_model_len",
        ('headrace run smollm2-135m "Name three rivers."', "The answer on stdout, figures on stderr."),
        ("git diff | headrace run MODEL 'Summarise this change.' -f notes.txt", "What is piped in and files are added."),
        ("headrace run MODEL -q -t 0 --json-schema person.json 'Who wrote Faust?'", "Only JSON that fits a schema."),
        ("headrace run model.gguf --raw 'Once upon a time' -m 60", "A model file continues a text."),
    )
    app.command(cls=short)(with_groups(run))


def run(
    model: ModelName,
    sampling: SamplingOptions,
    choice: ChoiceOptions,
    options: ModelOptions,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt.", show_default=False)] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            "--file", "-f", exists=True, dir_okay=False, readable=True, help="File with text to append; may be repeated."
        ),
    ] = None,
    system: SystemPrompt = None,
    chat_template: TemplateName = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text without the chat template.")] = False,
    n: Annotated[int, typer.Option("-n", min=1, max=64, help="Number of answers.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probability of each token, and this many alternatives.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when the answer is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the answer alone, without figures.")] = False,
    show_speculation: Annotated[bool, typer.Option("--show-speculation", help="Colour each token by its drafter.")] = False,
    show_exits: ShowExits = False,
) -> int:
    """Answer a prompt. The answer goes to stdout as it is generated, figures go to stderr.

    PROMPT, every --file and standard input are joined with an empty line between them. A missing model is downloaded. Ctrl-C
    ends the answer (exit code 130).
    """
    if raw and (system, chat_template) != (None, None):
        raise typer.BadParameter("--raw uses no chat template, so it takes no --system and no --chat-template")
    if logprobs is not None and not as_json:
        raise typer.BadParameter("--logprobs goes with --json")
    if show_speculation and (as_json or n > 1):
        raise typer.BadParameter("--show-speculation shows one answer as text; leave out --json and -n")
    if show_exits and (as_json or n > 1 or show_speculation):
        raise typer.BadParameter("--show-exits shows one answer as text; leave out --json, -n and --show-speculation")
    if show_exits and sampling.exit_threshold is None and sampling.cascade_threshold is None:
        raise typer.BadParameter("--show-exits goes with --exit-threshold or --cascade-threshold")
    check(options, sampling, choice, n=n, logprobs=logprobs)
    given = choice.changes()
    more = {**given, "n": n, "logprobs": logprobs}
    widest = max(n, choice.best_of or 0, choice.beam_width or 0)
    text = join_prompt(prompt, file or [])
    opening: dict[str, Any] = {"chat_template": chat_template, "max_num_seqs": widest, "preset": "online"}
    llm = open_llm(model, options, quiet=quiet, sampling=sampling, given=given, **opening)
    # The template runs in a process that may have to start first.
    moving(quiet).start("reading the prompt")
    params = sampling.bind(llm)(**more)
    printer: Any = None
    if show_speculation or show_exits:
        from headrace.cli.token_colours import ExitPrinter, OriginPrinter

        printer = ExitPrinter(llm.tokenizer, llm.model_config.num_layers) if show_exits else OriginPrinter(llm.tokenizer)
    if llm.model_config.source is not None and system is not None:
        raise ValueError(f"{model} has no chat roles; leave --system out")
    # An encoder-decoder has no chat template.
    raw = raw or llm.model_config.source is not None
    return _answer(llm, text if raw else _conversation(llm, text, system, chat_template), params, as_json, quiet, printer)


def _conversation(llm: Any, text: str, system: str | None, chat_template: str | None) -> Any:
    if not llm.opened.template.named:
        raise ValueError(f"{llm.opened.name} has no chat template; use --raw to continue a plain text")
    system = llm.opened.system if system is None else system
    roles = [{"role": "system", "content": system}] if system else []
    return llm.render([*roles, {"role": "user", "content": text}], chat_template=chat_template)


def _answer(llm: Any, prompt: str | list[int], params: Any, as_json: bool, quiet: bool, printer: Any) -> int:
    """Stream the answer, then report. The text before a Ctrl-C or an error stays on the screen."""
    from headrace.workflows.output_record import figures, record, speeds

    answer = AnswerWriter(wrapped=True)
    outputs: list[Any] = []
    with Interrupt() as interrupt:
        progress = moving(quiet)
        progress.start("reading the prompt")
        for delta in llm.stream(prompt, params, output=outputs, cancelled=watch_prompt(llm, outputs, progress, interrupt)):
            if printer is not None:
                printer.write(delta)
            elif not as_json and params.n == 1:
                answer.write(delta.text)
    progress.finish()
    (output,) = outputs
    if output.error is not None:
        answer.close()
        raise ValueError(output.error)
    if as_json:
        report = {"model": llm.opened.name, **record(output, llm.tokenizer), "speed": speeds(output)}
        print(json_text(report, indent=2))
    elif params.n > 1:
        for choice in output.outputs:
            answer.write(f"[{choice.index + 1}/{params.n}]\n{choice.text}")
            answer.close()
    elif printer is not None:
        printer.close()
    else:
        answer.close()
    if not quiet:
        note(figures(output))
    return INTERRUPTED if interrupt.requested else 0
