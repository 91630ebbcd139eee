"""chat: a conversation on the terminal, or through pipes."""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import Interrupt
from headrace.cli.lines import Lines, Typed
from headrace.cli.markdown import Markdown
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, Preset, SamplingOptions, ShowExits, SystemPrompt, check, with_groups
from headrace.cli.status import moving, reading
from headrace.cli.terminal import AnswerWriter, note
from headrace.data.fields import declared
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.progress import counted
from headrace.data.spelling import did_you_mean
from headrace.text.terminal_width import crop, width
from headrace.weights.store import expand
from headrace.workflows.conversation import Conversation, Message, load

INTERRUPTED = 130
HELP = """\
/system [TEXT]      show or set the system prompt ("" for none)
/set [NAME VALUE]   the settings and what they do (/set all: all of them); change one: /set temperature 0.5, /set seed none
/set preset NAME    precise, balanced or creative
/markdown [off|on]  whether headings, lists, emphasis and code get a look of their own
/clear              forget what was said; system prompt and settings stay
/retry              answer the last message again
/save FILE          write the conversation to a file
/load FILE          go on with a saved one
/stats              tokens and speed
/help               this list
/exit               leave (Ctrl-D, too)
A line that ends in a backslash goes on in the next; three quotes (\"\"\") open a message of several lines, three close it.
Ctrl-C stops an answer."""
COMMANDS = ["/system", "/set", "/markdown", "/clear", "/retry", "/save", "/load", "/stats", "/help", "/exit"]
# Settings a chat has no use for.
FIXED = frozenset({"n", "best_of", "beam", "logprobs", "logprobs_mode", "prompt_logprobs", "priority"})
DRAW = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
USUAL = (*DRAW[:4], "repetition_penalty", "max_tokens", "seed", "stop")  # what a bare /set shows in any case
NEUTRAL = SamplingParams()
SETTINGS = [name for name in SamplingParams.__struct_fields__ if name not in FIXED]


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "system resume preset temperature top_p max_tokens seed draft max_model_len",
        ("headrace chat smollm2-135m", "Talk; /help lists what else can be typed."),
        ('headrace chat MODEL --system "Answer in French." -t 0.3', "With a system prompt of one's own, and less chance."),
        ("headrace chat MODEL --load talk.json", "Go on with what /save has written."),
    )
    app.command(epilog=HELP.replace("\n", "\n\n"), cls=short)(with_groups(chat))


def chat(
    model: ModelName,
    sampling: SamplingOptions,
    options: ModelOptions,
    system: SystemPrompt = None,
    resume: Annotated[
        Path | None, typer.Option("--load", exists=True, dir_okay=False, help="Go on with a saved conversation.")
    ] = None,
    show_exits: ShowExits = False,
) -> int:
    """Talk with a model.

    Answers go to stdout, everything else to stderr, so that pipes work. When the context is full the oldest turns go.
    """
    check(options, sampling)
    if show_exits and options.exits is None and options.cascade is None:
        raise typer.BadParameter("--show-exits goes with --exits FOLDER or --cascade MODEL")
    conversation = Conversation() if resume is None else load(resume)
    llm = open_llm(model, options, sampling=sampling, max_num_seqs=1, preset="online")
    if llm.opened.template is None or llm.opened.template.source is None:
        raise ValueError(f"{model} has no chat template, so it cannot chat; headrace run --raw continues a text")
    if system is not None or resume is None:
        conversation.system = llm.opened.system if system is None else system
    lines = Lines(COMMANDS)
    if lines.terminal:
        note("/help lists the commands, Ctrl-D leaves")
    try:
        return Chat(llm, conversation, sampling.bind(llm)(), show_exits).run(lines)
    finally:
        lines.close()


class Chat:
    """Reads messages and commands, and answers them."""

    def __init__(self, llm: Any, conversation: Conversation, params: SamplingParams, show_exits: bool = False) -> None:
        self.llm = llm
        self.conversation = conversation
        self.params = params
        self.show_exits = show_exits
        self.limit: int = llm.memory_plan.max_model_len
        self.last: RequestOutput | None = None  # the last answer
        self.tokens = 0  # of all answers
        self.markdown = not os.environ.get("NO_COLOR")
        self.interrupt = Interrupt()

    def run(self, lines: Lines) -> int:
        """Until the input ends or /exit. What goes wrong is said, and the chat goes on.

        On a terminal no Ctrl-C leaves the program, whenever and however often it is pressed.
        """
        with Interrupt(second=not lines.terminal) as self.interrupt:
            while True:
                try:
                    typed = self.interrupt.wait(lines.read)
                except KeyboardInterrupt:
                    if not lines.terminal:
                        return INTERRUPTED
                    note("\n(Ctrl-D or /exit leaves)")
                    continue
                if typed is None or (typed.command and typed.text.split()[0] in ("/exit", "/quit")):
                    return 0
                self._act(typed)

    def _act(self, typed: Typed) -> None:
        try:
            if typed.command:
                self._command(*typed.text.split(maxsplit=1))
            elif typed.text.strip():
                self.conversation.ask(typed.text)
                self._answer()
        except ValueError as error:
            note(f"headrace: {' '.join(str(error).split())}")

    # -- answering -----------------------------------------------------------------------------------------------------
    def _answer(self, otherwise: list[Message] | None = None) -> None:
        """Answer the last message. Where nothing comes of it, it goes, and `otherwise` takes its place. Raises ValueError."""
        text = ""
        try:
            moving().start("reading the prompt")  # its template runs in a process that has to start
            text = self._stream(self._prompt())
        finally:
            moving().finish()
            self.interrupt.requested = False
            if text:
                self.conversation.answer(text)
            else:
                self.conversation.turns[-1:] = [otherwise] if otherwise else []

    def _prompt(self) -> list[int]:
        """The conversation within the context, with room for an answer: a quarter of it, or max_tokens where that is less."""
        room = min(self.params.max_tokens or self.limit, max(self.limit // 4, 1))
        prompt, gone = self.conversation.fit(self.llm.render, self.limit - room)
        if gone:
            which = "the oldest turn is" if len(gone) == 1 else f"the {len(gone)} oldest turns are"
            first = " ".join(gone[0][0]["content"].split())
            note(_fit_line(f"(the context of {self.limit} tokens is full: {which} forgotten, from: {first}"[:2000], ")"))
        return prompt

    def _stream(self, prompt: list[int]) -> str:
        """The answer's text, written as it comes; what Ctrl-C leaves of it, too."""
        answer, depths = AnswerWriter(wrapped=True, form=Markdown if self.markdown else None), self._depths()
        made: list[RequestOutput] = []
        progress = moving()
        progress.start("reading the prompt")
        for delta in self.llm.stream(
            prompt, self.params, output=made, cancelled=reading(self.llm, made, progress, self.interrupt)
        ):
            if depths is None:
                answer.write(delta.text)
            else:
                depths.write(delta)
        progress.finish()
        (answer if depths is None else depths).close()
        (self.last,) = made
        if self.last.error is not None:
            raise ValueError(self.last.error)
        (output,) = self.last.outputs
        self.tokens += len(output.token_ids)
        if self.interrupt.requested:
            note("(stopped)")
        elif output.finish_reason == "length":
            full = len(prompt) + len(output.token_ids) >= self.limit
            note("(cut: the context is full)" if full else f"(cut after max_tokens, {self.params.max_tokens})")
        elif not output.text:
            note("(an empty answer)")
        return output.text

    def _depths(self) -> Any:
        """What colours the tokens of an answer that may leave early; None where that is not asked for."""
        if not self.show_exits or not self.params.leaves:
            return None
        from headrace.cli.origins import Depths

        return Depths(self.llm.tokenizer, self.llm.model_config.num_layers)

    # -- commands ------------------------------------------------------------------------------------------------------
    def _command(self, name: str, rest: str = "") -> None:
        action = getattr(self, f"_do_{name[1:]}", None) if name in COMMANDS else None
        if action is None:
            question = did_you_mean(name, COMMANDS, "/help lists them")
            raise ValueError(f'unknown command {name}; {question} (a message that begins with a slash: """{name} …""")')
        action(rest.strip())

    def _do_help(self, _: str) -> None:
        note(HELP)

    def _do_system(self, text: str) -> None:
        if text:
            self.conversation.system = None if text in ('""', "''") else text
        note(f"system prompt: {self.conversation.system or 'none (the template may have its own)'}")

    def _do_set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if text in ("", "all"):
            note(_table(self.params, everything=text == "all"))
        elif name not in (*SETTINGS, "preset"):
            question = did_you_mean(name, [*SETTINGS, "preset"], "/set all lists them")
            raise ValueError(f"unknown setting {name}; {question}")
        elif not value.strip():
            if name == "preset":
                raise ValueError(f"/set preset takes a name: {', '.join(Preset)}")
            note(_table(self.params, names=(name,)))
        elif name == "preset":
            self.params = self.params.replace(**_preset(value.strip()))
            note(f"settings: {value.strip()}")
        else:
            self.params = self.params.replace(**{name: _value(value.strip())})
            note(f"{name}: {_shown(getattr(self.params, name))}")

    def _do_markdown(self, text: str) -> None:
        if text not in ("", "on", "off"):
            raise ValueError("/markdown takes on or off")
        self.markdown = not self.markdown if not text else text == "on"
        note(f"markdown: {'on' if self.markdown else 'off'}")

    def _do_clear(self, _: str) -> None:
        self.conversation.turns.clear()
        note("forgotten")

    def _do_retry(self, _: str) -> None:
        if not self.conversation.turns:
            raise ValueError("there is nothing to answer again")
        if self.params.seed is not None or self.params.greedy:
            note("(the same answer will come: temperature is 0 or the seed is set)")
        before = self.conversation.turns.pop()
        self.conversation.ask(before[0]["content"])
        self._answer(before)

    def _turns(self) -> str:
        count = len(self.conversation.turns)
        return "1 turn" if count == 1 else f"{count} turns"

    def _do_save(self, text: str) -> None:
        path = _path(text, "/save")
        self.conversation.save(path, self.llm.opened.name)
        note(f"{self._turns()} saved to {path}")

    def _do_load(self, text: str) -> None:
        path = _path(text, "/load")
        self.conversation = load(path)
        note(f"{self._turns()} loaded from {path}")

    def _do_stats(self, _: str) -> None:
        from headrace.workflows.output_record import figures

        used = len(self.llm.render(self.conversation.messages)) if self.conversation.turns else 0
        note(f"{self._turns()}, {used} of {self.limit} tokens of context, {counted(self.tokens, 'tokens')} answered")
        if self.last is not None:
            note(f"last answer: {figures(self.last)}")


def _fit_line(text: str, end: str) -> str:
    """One line of the terminal, cut where it is too long."""
    return crop(text, shutil.get_terminal_size().columns - width(end)) + end


def _table(params: SamplingParams, *, everything: bool = False, names: Sequence[str] = ()) -> str:
    """Settings, a line each: name, value and what it does; of the rarer ones those that were changed."""
    docs = {one.name: one.field.help for one in declared(SamplingParams)}
    rows = []
    for name in names or SETTINGS:
        value = getattr(params, name)
        if everything or names or name in USUAL or value != getattr(NEUTRAL, name):
            rows.append((name, "none" if value in ((), None) else _shown(value), docs.get(name, "")))
    widths = [max(len(row[at]) for row in rows) for at in range(2)]
    room = max(shutil.get_terminal_size().columns - 1, 40)
    return "\n".join(crop(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {what}".rstrip(), room) for name, value, what in rows)


def _path(text: str, command: str) -> Path:
    if not text:
        raise ValueError(f"{command} takes a file name")
    return expand(text)


def _preset(name: str) -> dict[str, Any]:
    """What a preset says of the draw; where answers end stays as it is."""
    if name not in list(Preset):
        raise ValueError(f"unknown preset {name}; known: {', '.join(Preset)}")
    params = getattr(SamplingParams, name)()
    return {one: getattr(params, one) for one in DRAW}


def _value(text: str) -> Any:
    """JSON where it is JSON, nothing for none, else the text itself."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
