"""Prompts of generation requests: a conversation for the model's chat template, or texts and token ids without one."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from headrace.data.structured import StructuredOutputs
from headrace.decoding.tools import ToolChoice, Tooling, callable_tools, conversation, for_mask, schemas_of, tooling
from headrace.server.engines.models import Service
from headrace.server.http.api_error import bad
from headrace.server.http.body_limits import read_json
from headrace.server.protocols.chat_messages import CONTINUE, Message, check_ending, read_messages
from headrace.server.protocols.structured import prepare_schemas, schema_of
from headrace.text.chat import ChatTemplate, TemplateError, check_template_kwargs

# In chat_template_kwargs: the name of one of the model's templates.
CHAT_TEMPLATE = "chat_template"
# OpenAI's values of reasoning_effort; the template reads the value it gets.
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class Prompt(Protocol):
    """The input of a generation request."""

    name: ClassVar[str]  # its name in error messages

    async def tooling(self, service: Service, form: StructuredOutputs | None, open_objects: bool) -> Tooling | None:
        """The tools that answers may call, and the grammar of such answers. `form`: the format of answers without calls.

        Raises ApiError or ToolError.
        """

    async def encode(self, service: Service, tools: Tooling | None, *, limited: bool = True) -> list[list[int]]:
        """Token ids of each prompt. With `limited` a text far longer than the context is not encoded to its end.

        Raises the errors that `as_api_error` knows.
        """


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a chat, with the tools and variables of their template."""

    name: ClassVar[str] = "messages"
    messages: list[Message]
    tools: ToolChoice
    template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def variables(self) -> dict[str, Any]:
        """Variables that the client sets in the chat template. Raises ApiError."""
        variables = dict(self.template_kwargs or {})
        try:
            check_template_kwargs(variables)
        except TemplateError as error:
            raise bad(str(error), error.field) from None
        if not isinstance(variables.get(CHAT_TEMPLATE), str | None):
            message = f"{CHAT_TEMPLATE} in chat_template_kwargs must be the name of one of the model's templates"
            raise bad(message, "chat_template_kwargs")
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return variables

    def template(self, service: Service) -> ChatTemplate:
        """The model's template for these messages. Raises ApiError or TemplateError."""
        name = self.variables().get(CHAT_TEMPLATE)
        has_tools = bool(self.tools.tools) and self.tools.tool_choice != "none"
        return service.llm.opened.template.choose(name, tools=has_tools)

    async def tooling(self, service: Service, form: StructuredOutputs | None, open_objects: bool) -> Tooling | None:
        usable, must = callable_tools(self.tools)
        if not usable:
            return None
        schemas, answer = schemas_of(usable), None
        if form is not None and not must:
            if (schema := schema_of(form)) is None:
                message = "with tools, the format of an answer must be a JSON schema or json_object; leave one of them out"
                raise bad(message, "response_format")
            schemas.append(schema)
        known = await prepare_schemas(service, schemas, open_objects=open_objects)
        if len(schemas) > len(usable):
            answer = for_mask(known[-1])
        control_id = service.llm.opened.tokenizer.control_id
        return tooling(self.tools, self.template(service).source, control_id, known[: len(usable)], answer)

    async def encode(self, service: Service, tools: Tooling | None, *, limited: bool = True) -> list[list[int]]:
        template, variables = self.template(service), self.variables()
        variables.pop(CHAT_TEMPLATE, None)
        if tools is not None:
            variables |= tools.template_variables(template.source)
        check_ending(self.messages, self.continue_final_message, self.add_generation_prompt)
        messages = conversation(read_messages(self.messages), tools, template.source, read_json)
        llm, mark = service.llm, ""
        if llm.opened.config.encoder:
            raise bad("this model is an encoder and cannot generate text; request embeddings or classes", "model")
        if self.continue_final_message:
            mark = secrets.token_hex(16)
            messages = [*messages[:-1], _marked(messages[-1], mark)]
        new_turn = not self.continue_final_message and self.add_generation_prompt is not False
        text = await template.rendered_marked(llm.opened.with_system(messages), add_generation_prompt=new_turn, **variables)
        if mark:
            # The answer continues the last message: cut what the template writes after its text.
            text, found, _ = text.rpartition(mark)
            if not found or mark in text:
                raise bad("the model's template does not let its final message be continued; leave the field out", CONTINUE)
        return [await llm.encode(text, add_special=False, marked=template.marks, limited=limited)]


def check_effort(effort: str | None, name: str = "reasoning_effort") -> None:
    """Raises ApiError for a reasoning effort that OpenAI does not have."""
    if effort not in (None, *EFFORTS):
        raise bad(f"{name} must be one of {', '.join(EFFORTS)}, not {effort[:40]!r}", name)


def _marked(message: Message, mark: str) -> Message:
    """The message with `mark` after its text. Raises ApiError if it has no text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    if isinstance(content, list) and content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + mark}]}
    raise bad("the last message has no text to continue; give it a content", CONTINUE)


@dataclass(frozen=True, slots=True)
class Texts:
    """One or several prompts, as texts or token ids, that the answers continue. `values`: a text, token ids, or a list."""

    name: ClassVar[str] = "prompt"
    values: str | list[Any]

    def prompts(self) -> list[Any]:
        """One text, or one list of token ids, for each prompt."""
        values = self.values if isinstance(self.values, list) else [self.values]
        return [values] if values and isinstance(values[0], int) else values

    async def tooling(self, service: Service, form: StructuredOutputs | None, open_objects: bool) -> Tooling | None:
        return None

    async def encode(self, service: Service, tools: Tooling | None, *, limited: bool = True) -> list[list[int]]:
        given, bos = self.prompts(), service.llm.opened.tokenizer.bos_id
        if not given:
            raise bad("prompt is empty; give a text, token ids, or a list of those", "prompt")
        prompts: list[list[int]] = given
        if isinstance(given[0], str):
            prompts = await service.llm.encode_all(given)
            # An empty text is the beginning of a document, as with OpenAI.
            prompts = prompts if bos is None else [ids or [bos] for ids in prompts]
        if not all(prompts):
            raise bad("a prompt is empty, and this model has no BOS token to begin with; give at least one token", "prompt")
        return prompts
