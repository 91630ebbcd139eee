"""Chat templates: messages to the prompt a model was trained on, with hard limits on what the template may use."""

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

from headrace.text.template_process import TemplateError, TemplateLimits, TemplateProcess
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError", "TemplateLimits", "validate_messages"]

DEFAULT_LIMITS = TemplateLimits()
NO_TEMPLATE = "this model has no chat template: use `generate` or `run --raw`, or pass a template"


class ChatTemplate:
    """A jinja2 chat template, in the dialect of transformers' `apply_chat_template`.

    It is rendered in a process of its own (started at the first `render` and kept), which the kernel ends when it uses
    more CPU time or memory than `limits` allow; the next `render` starts another. Encode the result with
    `add_special=False`: the template writes BOS itself. `bos_token` and `eos_token` are variables of the template.
    Without a source, or with a bad one, `render` raises TemplateError: such a model can still continue plain prompts.
    May be used from several threads.
    """

    def __init__(
        self, source: str | None, bos_token: str = "", eos_token: str = "", limits: TemplateLimits = DEFAULT_LIMITS
    ) -> None:
        self.source = source
        self.limits = limits
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._process: TemplateProcess | None = None
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tokenizer: Tokenizer, source: str | None = None) -> Self:
        """The template of a model, or `source` in its stead."""
        source = tokenizer.chat_template if source is None else source
        return cls(source, tokenizer.bos_token, tokenizer.eos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,  # so that no variable's name is taken
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation. `variables` are the template's own (`enable_thinking=False`)."""
        source, limits = self._usable_source(), self.limits
        context = {
            **self._tokens,
            **variables,
            "messages": validate_messages(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        request = {"source": source, "context": context, "seconds": limits.seconds, "max_output": limits.output}
        try:
            line = json.dumps(request, allow_nan=False).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"messages, tools and template variables must be plain JSON values: {error}") from None
        with self._lock:
            reply = self._ask(line)
        if "error" in reply:
            raise TemplateError(f"chat template: {' '.join(reply['error'].split())[:300]}")
        return reply["text"]

    def start(self) -> None:
        """Start the process ahead of the first `render`, without waiting for it."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """End the process, if there is one."""
        with self._lock:
            if self._process is not None:
                self._process.stop()
            self._process = None

    def _usable_source(self) -> str:
        if self.source is None:
            raise TemplateError(NO_TEMPLATE)
        if len(self.source) > self.limits.source:
            raise TemplateError(f"chat template: it has {len(self.source)} characters and {self.limits.source} is the most")
        return self.source

    def _running(self) -> TemplateProcess:
        if self._process is None or self._process.owner != os.getpid():  # a fork must not share its parent's pipes
            self._process = TemplateProcess(self.limits)
        return self._process

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._running()
        try:
            return process.ask(line)
        except BaseException:  # also a Ctrl-C: an answer still on its way must not be taken for the next one
            process.stop()
            self._process = None
            raise


def validate_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: {"role": text, "content": text, …}, other keys as they are.

    A content given in parts ([{"type": "text", "text": …}]) becomes their texts, one per line; None stays where an
    assistant only called tools. Raises TemplateError, with the number of the message, for anything else.
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
        content = "\n".join(_part(index, part) for part in content)
        message = {**message, "content": content}
    if content is None and not message.get("tool_calls"):
        raise TemplateError(f"message {index} needs a content")
    if content is not None and not isinstance(content, str):
        raise TemplateError(f"the content of message {index} must be text, not {type(content).__name__}")
    return dict(message)


def _part(index: int, part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise TemplateError(f'message {index}: only parts {{"type": "text", "text": …}} can be read; this model takes text')
    return str(part["text"])
