"""Chat templates: messages to the prompt a model was trained on, with hard limits on what the template may use."""

import contextlib
import copy
import functools
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from headrace.confined.pool import OverrunError, Task, shared_pool
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError", "TemplateLimits", "validate_messages"]

NO_TEMPLATE = "this model has no chat template: use `generate` or `run --raw`, or pass a template"
Message = Mapping[str, Any]
# Names that chat_template_kwargs may not set: requests have fields for them, or they belong to the template language.
RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message bos_token eos_token "
    "raise_exception strftime_now range dict lipsum cycler joiner namespace".split()
)


class TemplateError(ValueError):
    """A conversation that cannot become a prompt. The message names the remedy.

    field: the request's field, as in `FieldError`.
    """

    def __init__(self, message: str, field: str = "prompt") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering: source and output in characters, CPU seconds, address space in bytes."""

    source: int = 256 << 10
    output: int = 8 << 20
    seconds: float = 2.0
    memory: int = 512 << 20

    def task(self, function: str) -> Task:
        # UTF-8 takes up to four bytes a character.
        answer = 4 * self.output + 1024
        return Task("headrace.text.rendering", function, seconds=self.seconds, memory=self.memory, answer=answer)


DEFAULT_LIMITS = TemplateLimits()


@dataclass(frozen=True, slots=True)
class ContentTokens:
    """Tokens that are plain text inside the content of a conversation.

    control: control tokens. quoted: these and other added tokens, for tool results and documents.
    """

    control: list[str]
    quoted: list[str]


class ChatTemplate:
    """The jinja2 chat templates of a model, in the dialect of transformers' `apply_chat_template`.

    A template is rendered in a confined process, which the kernel ends when it exceeds the CPU time or memory of `limits`.
    `bos_token` and `eos_token` are variables of the template. `source` is the template named "default"; `choose` selects
    another one. Without a valid source rendering raises TemplateError; such a model can still continue plain prompts.
    Thread-safe.

    `render` returns text for people. A prompt is encoded from `render_marked`, with `add_special=False` (the template writes
    BOS itself) and `marked=self.marks`: control tokens inside the content then stay text.
    """

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        limits: TemplateLimits = DEFAULT_LIMITS,
        *,
        named: Mapping[str, str] | None = None,
        content: ContentTokens | None = None,
    ) -> None:
        self.source = source
        self.limits = limits
        self.named = named or {}
        self._content = content
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> Self:
        """Return the templates of a model, or the single template `source` instead."""
        named = tokenizer.templates if source is None else {"default": source}
        content = ContentTokens(tokenizer.control_texts, tokenizer.structure_texts)
        return cls(named.get("default"), tokenizer.bos_token, tokenizer.eos_token, named=named, content=content)

    def choose(self, name: str | None = None, *, tools: bool = False, parse_special: bool = False) -> Self:
        """Return the template of a conversation, as transformers chooses it.

        The template `name` if given, otherwise "tool_use" if there are tools and such a template, otherwise "default".
        parse_special: control tokens inside the content are control tokens. Raises TemplateError for an unknown name.
        """
        known = " and ".join(filter(None, [", ".join(sorted(self.named)[:-1]), *sorted(self.named)[-1:]]))
        if name is not None and name not in self.named:
            raise TemplateError(
                f"chat_template {name!r:.60}: this model has no template of this name; it has {known or 'none'}",
                "chat_template",
            )
        chosen = name or ("tool_use" if tools and "tool_use" in self.named else "default")
        if self.named and chosen not in self.named:
            raise TemplateError(
                f"this model has several chat templates and no default; set chat_template to {known}", "chat_template"
            )
        template, source = self, self.named.get(chosen, self.source)
        if source != self.source:
            template = copy.copy(self)
            template.source = source
            # The cached variables belong to the other template.
            template.__dict__.pop("_variables", None)
        return template.trusting() if parse_special else template

    def trusting(self) -> Self:
        """Return a copy for trusted content, whose control tokens are control tokens."""
        template = copy.copy(self)
        template._content = None
        return template

    @property
    def marks(self) -> bool:
        """Whether `render_marked` marks control tokens inside the content."""
        return self._content is not None

    def __repr__(self) -> str:
        return "ChatTemplate(none)" if self.source is None else f"ChatTemplate({len(self.source)} characters)"

    def reads(self, name: str) -> bool:
        """Whether the template reads a variable of that name from its caller.

        True if the template cannot be parsed; `render` then raises the reason.
        """
        known = None if self.source is None else self._variables
        return known is None or name in known

    @functools.cached_property
    def _variables(self) -> frozenset[str] | None:
        with self._limit_errors():
            names = shared_pool().run(self.limits.task("variables"), {"source": self._usable_source()})["names"]
        return None if names is None else frozenset(names)

    # `messages` is positional-only, so a template may have a variable of that name.
    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text of a conversation.

        variables: `add_generation_prompt` (default true), `tools`, `documents`, and the template's own (`enable_thinking`).
        """
        question = self._question(messages, variables)
        with self._limit_errors():
            return _text(shared_pool().run(self.limits.task("render"), question))

    def render_marked(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text with marks, for `Tokenizer.encode`."""
        question = self._question(messages, variables) | self._marking()
        with self._limit_errors():
            return _text(shared_pool().run(self.limits.task("render"), question))

    async def rendered_marked(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """`render_marked` for asyncio. Raises BusyError besides."""
        question = self._question(messages, variables) | self._marking()
        with self._limit_errors():
            return _text(await shared_pool().ask(self.limits.task("render"), question))

    def _marking(self) -> dict[str, Any]:
        return {} if self._content is None else {"control": self._content.control, "quoted": self._content.quoted}

    def _question(self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any]) -> dict[str, Any]:
        source = self._usable_source()
        context = {
            **self._tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            **variables,
            "messages": validate_messages(messages),
        }
        try:
            text = json.dumps(context, allow_nan=False, ensure_ascii=False)
            text.encode()
        except UnicodeEncodeError:
            raise TemplateError("the conversation is not Unicode: it has a lone surrogate; remove it") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"messages, tools and template variables must be plain JSON values: {error}") from None
        return {"source": source, "context": text, "most": self.limits.output}

    @contextlib.contextmanager
    def _limit_errors(self) -> Iterator[None]:
        """Turn the end of a rendering at a limit into a TemplateError."""
        limits = self.limits
        try:
            yield
        except OverrunError as error:
            why = f"it takes more than {limits.seconds:g} s and may loop without end"
            if error.in_time:
                why = f"its process ended early (code {error.code}); it may need more than {limits.memory >> 20} MiB"
            raise TemplateError(f"chat template: {why}; use another template") from None

    def _usable_source(self) -> str:
        if self.source is None:
            raise TemplateError(NO_TEMPLATE)
        if len(self.source) > self.limits.source:
            raise TemplateError(f"chat template: it has {len(self.source)} characters and {self.limits.source} is the most")
        return self.source


def _text(answer: dict[str, str]) -> str:
    if "error" in answer:
        raise TemplateError(f"chat template: {' '.join(answer['error'].split())[:300]}")
    return answer["text"]


def validate_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in the form that templates expect: {"role": text, "content": text, …}, other keys unchanged.

    A content in parts ([{"type": "text", "text": …}]) becomes their texts, one per line. Parts of type "quoted" are texts of
    tools or documents; a content with such parts stays a list, which rendering joins in the same way. The content may be None
    if an assistant only called tools. Raises TemplateError with the number of an invalid message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TemplateError('messages must be a list of {"role": …, "content": …}')
    if not messages:
        raise TemplateError("messages is empty; give at least one")
    return [_validate_message(index, message) for index, message in enumerate(messages)]


def _validate_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TemplateError(f'message {index} must be {{"role": …, "content": …}}, not {type(message).__name__}')
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise TemplateError(f"message {index} needs a role: system, user, assistant or tool")
    if isinstance(content, list):
        parts = [_part(index, part) for part in content]
        if any(part["type"] == "quoted" for part in parts):
            return {**message, "content": parts}
        content = "\n".join(part["text"] for part in parts)
        message = {**message, "content": content}
    if content is None and not message.get("tool_calls"):
        raise TemplateError(f"message {index} needs a content")
    if content is not None and not isinstance(content, str):
        raise TemplateError(f"the content of message {index} must be text, not {type(content).__name__}")
    return dict(message)


def _part(index: int, part: Any) -> dict[str, str]:
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "quoted") or not isinstance(part.get("text"), str):
        raise TemplateError(f'message {index}: only parts {{"type": "text", "text": …}} can be read; this model takes text')
    return {"type": str(part["type"]), "text": str(part["text"])}


def check_template_kwargs(given: Iterable[str]) -> None:
    """Raise TemplateError for a name in `chat_template_kwargs` with an argument of its own, or of the template language."""
    if taken := RESERVED.intersection(given):
        raise TemplateError(
            f"chat_template_kwargs may not set {', '.join(sorted(taken))}; leave it out", "chat_template_kwargs"
        )


def check_continues(talks: Iterable[Sequence[Message]]) -> None:
    """Raise TemplateError unless the last message of each conversation is text of the assistant."""
    for *_, last in talks:
        if last["role"] != "assistant":
            raise TemplateError(
                "continue_final_message: the last message is not the assistant's; end with one of the assistant",
                "continue_final_message",
            )
        if last.get("tool_calls"):
            raise TemplateError(
                "continue_final_message: the last message calls tools and has no text; add the tools' results",
                "continue_final_message",
            )


def render_open(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> str:
    """Return the prompt of a conversation up to the end of its last message's text.

    render: applies the template without opening a new turn. A random mark after the text shows where to cut.
    Raises TemplateError if the template drops the mark.
    """
    messages = validate_messages(messages)
    check_continues([messages])
    *earlier, last = messages
    mark = secrets.token_hex(16)
    before, separator, _ = render([*earlier, {**last, "content": last["content"] + mark}]).rpartition(mark)
    if not separator or mark in before:
        raise TemplateError(
            "continue_final_message: the model's template does not allow it; leave it out", "continue_final_message"
        )
    return before


def split_template_kwargs(given: Mapping[str, Any] | None, chat_template: str | None) -> tuple[dict[str, Any], str | None]:
    """The variables in chat_template_kwargs, and the name of the template, which may stand among them. Raises TemplateError."""
    variables = dict(given or {})
    check_template_kwargs(variables)
    return variables, variables.pop("chat_template", chat_template)
