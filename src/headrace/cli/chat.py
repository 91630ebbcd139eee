"""Command chat: a conversation on the terminal, or through pipes."""

import json
import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.interrupt import INTERRUPTED, Interrupt
from headrace.cli.markdown import Markdown
from headrace.cli.message_input import MessageReader, TypedMessage
from headrace.cli.opening import open_llm
from headrace.cli.options import (
    ModelName,
    ModelOptions,
    SamplingOptions,
    ShowExits,
    SystemPrompt,
    TemplateName,
    check,
    with_groups,
)
from headrace.cli.output import crop, moving, watch_prompt, width
from headrace.cli.terminal import AnswerWriter, note
from headrace.data.fields import declared
from headrace.data.outputs import RequestOutput
from headrace.data.params import PRESETS, SamplingParams
from headrace.data.progress import counted
from headrace.data.spelling import did_you_mean
from headrace.weights.store import expand
from headrace.workflows.conversation import Conversation, Message, load

HELP = """\
/system [TEXT]      show or set the system prompt ("" for none)
/set [NAME VALUE]   show the settings (/set all: every one), or change one: /set temperature 0.5, /set seed none
/set preset NAME    precise, balanced or creative
/markdown [off|on]  format headings, lists, emphasis and code
/clear              forget the conversation; system prompt and settings stay
/retry              answer the last message again
/save FILE          write the conversation to a file
/load FILE          continue a saved conversation
/stats              tokens and speed
/help               this list
/exit               end the program (also Ctrl-D)
A line that ends in a backslash continues in the next one; three quotes (\"\"\") open and close a message of several lines.
Ctrl-C stops an answer."""
COMMANDS = ["/system", "/set", "/markdown", "/clear", "/retry", "/save", "/load", "/stats", "/help", "/exit"]
# Settings without use in a chat.
FIXED = frozenset({"n", "best_of", "beam", "logprobs", "logprobs_mode", "prompt_logprobs", "priority"})
DRAW = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
# Settings that /set without a name always shows.
USUAL = (*DRAW[:4], "repetition_penalty", "max_tokens", "seed", "stop")
NEUTRAL = SamplingParams()
SETTINGS = [name for name in SamplingParams.__struct_fields__ if name not in FIXED]


def register(app: typer.Typer) -> None:
    """Add the command."""
    short = short_help(
        "system resume preset temperature top_p max_tokens seed draft max_model_len",
        ("headrace chat smollm2-135m", "Start a conversation; /help lists the commands."),
        ('headrace chat MODEL --system "Answer in French." -t 0.3', "With a system prompt of one's own, and less chance."),
        ("headrace chat MODEL --load talk.json", "Continue what /save wrote."),
    )
    app.command(epilog=HELP.replace("\n", "\n\n"), cls=short)(with_groups(chat))


def chat(
    model: ModelName,
    sampling: SamplingOptions,
    options: ModelOptions,
    system: SystemPrompt = None,
    chat_template: TemplateName = None,
    resume: Annotated[
        Path | None, typer.Option("--load", exists=True, dir_okay=False, help="Continue a saved conversation.")
    ] = None,
    show_exits: ShowExits = False,
) -> int:
    """Talk with a model.

    Answers go to stdout, everything else to stderr, so pipes work. When the context is full, the oldest turns are dropped.
    """
    check(options, sampling)
    if show_exits and options.exits is None and options.cascade is None:
        raise typer.BadParameter("--show-exits goes with --exits FOLDER or --cascade MODEL")
    conversation = Conversation() if resume is None else load(resume)
    llm = open_llm(model, options, sampling=sampling, chat_template=chat_template, max_num_seqs=1, preset="online")
    if not llm.opened.template.named:
        raise ValueError(f"{model} has no chat template, so it cannot chat; headrace run --raw continues a text")
    if system is not None or resume is None:
        conversation.system = llm.opened.system if system is None else system
    reader = MessageReader(COMMANDS)
    if reader.terminal:
        note("/help lists the commands, Ctrl-D leaves")
    try:
        return ChatSession(llm, conversation, sampling.bind(llm)(), show_exits, chat_template).run(reader)
    finally:
        reader.close()


class ChatSession:
    """The loop of one chat: reads messages and commands, and answers them.

    last: the last answer. tokens: of all answers. chat_template: name of the model's template, None for its default.
    """

    def __init__(
        self,
        llm: Any,
        conversation: Conversation,
        params: SamplingParams,
        show_exits: bool = False,
        chat_template: str | None = None,
    ) -> None:
        self.llm = llm
        self.render = partial(llm.render, chat_template=chat_template)
        self.conversation = conversation
        self.params = params
        self.show_exits = show_exits
        self.limit: int = llm.memory_plan.max_model_len
        self.last: RequestOutput | None = None
        self.tokens = 0
        self.markdown = not os.environ.get("NO_COLOR")
        self.interrupt = Interrupt()

    def run(self, reader: MessageReader) -> int:
        """Run until the input ends or /exit. Returns the exit code. Prints errors and goes on.

        On a terminal, Ctrl-C never ends the program.
        """
        with Interrupt(second=not reader.terminal) as self.interrupt:
            while True:
                try:
                    typed = self.interrupt.wait(reader.read)
                except KeyboardInterrupt:
                    if not reader.terminal:
                        return INTERRUPTED
                    note("\n(Ctrl-D or /exit leaves)")
                    continue
                if typed is None or (typed.command and typed.text.split()[0] in ("/exit", "/quit")):
                    return 0
                self._act(typed)

    def _act(self, typed: TypedMessage) -> None:
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
        """Answer the last message. Without an answer, `otherwise` replaces its turn, or it is dropped. Raises ValueError."""
        text = ""
        try:
            # The template runs in a process that may have to start first.
            moving().start("reading the prompt")
            text = self._stream(self._prompt())
        finally:
            moving().finish()
            self.interrupt.requested = False
            if text:
                self.conversation.answer(text)
            else:
                self.conversation.turns[-1:] = [otherwise] if otherwise else []

    def _prompt(self) -> list[int]:
        """Return the token ids of the conversation, with room for an answer: a quarter of the context at most."""
        room = min(self.params.max_tokens or self.limit, max(self.limit // 4, 1))
        prompt, dropped = self.conversation.fit(self.render, self.limit - room)
        if dropped:
            which = "the oldest turn is" if len(dropped) == 1 else f"the {len(dropped)} oldest turns are"
            first = " ".join(dropped[0][0]["content"].split())
            note(_fit_line(f"(the context of {self.limit} tokens is full: {which} forgotten, from: {first}"[:2000], ")"))
        return prompt

    def _stream(self, prompt: list[int]) -> str:
        """Write the answer as it grows. Returns its text, also after Ctrl-C."""
        answer, exits = AnswerWriter(wrapped=True, form=Markdown if self.markdown else None), self._exit_printer()
        outputs: list[RequestOutput] = []
        progress = moving()
        progress.start("reading the prompt")
        for delta in self.llm.stream(
            prompt, self.params, output=outputs, cancelled=watch_prompt(self.llm, outputs, progress, self.interrupt)
        ):
            if exits is None:
                answer.write(delta.text)
            else:
                exits.write(delta)
        progress.finish()
        (answer if exits is None else exits).close()
        (self.last,) = outputs
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

    def _exit_printer(self) -> Any:
        """Return the printer of tokens with early exit, None if --show-exits is off or no token can exit."""
        if not self.show_exits or not self.params.leaves:
            return None
        from headrace.cli.token_colours import ExitPrinter

        return ExitPrinter(self.llm.tokenizer, self.llm.model_config.num_layers)

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
                raise ValueError(f"/set preset takes a name: {', '.join(PRESETS)}")
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

        used = len(self.render(self.conversation.messages)) if self.conversation.turns else 0
        note(f"{self._turns()}, {used} of {self.limit} tokens of context, {counted(self.tokens, 'tokens')} answered")
        if self.last is not None:
            note(f"last answer: {figures(self.last)}")


def _fit_line(text: str, end: str) -> str:
    """Cut a text to one line of the terminal that ends with `end`."""
    return crop(text, shutil.get_terminal_size().columns - width(end)) + end


def _table(params: SamplingParams, *, everything: bool = False, names: Sequence[str] = ()) -> str:
    """Return one line for each setting: name, value, description; by default the usual and the changed settings."""
    docs = {declaration.name: declaration.field.help for declaration in declared(SamplingParams)}
    rows = []
    for name in names or SETTINGS:
        value = getattr(params, name)
        if everything or names or name in USUAL or value != getattr(NEUTRAL, name):
            rows.append((name, "none" if value in ((), None) else _shown(value), docs.get(name, "")))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    room = max(shutil.get_terminal_size().columns - 1, 40)
    return "\n".join(crop(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {what}".rstrip(), room) for name, value, what in rows)


def _path(text: str, command: str) -> Path:
    if not text:
        raise ValueError(f"{command} takes a file name")
    return expand(text)


def _preset(name: str) -> dict[str, Any]:
    """Return the sampling settings of a preset, without those that end answers."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name}; known: {', '.join(PRESETS)}")
    params = getattr(SamplingParams, name)()
    return {setting: getattr(params, setting) for setting in DRAW}


def _value(text: str) -> Any:
    """Parse a setting's value: "none", JSON, or otherwise the text itself."""
    if text.lower() == "none":
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)
