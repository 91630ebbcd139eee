"""The body of a line in OpenAI's batch format, read with the server's types and checks: both accept the same fields.

Only the fields of `server.fields.OFFLINE_IGNORED` and `OFFLINE_REFUSED` are treated otherwise than by the server.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from headrace.data.structured import StructuredOutputs
from headrace.decoding.json_schema.prepare import prepare
from headrace.decoding.tools import ToolChoice, ToolError, Tooling, callable_tools, for_mask, tooling
from headrace.server.http.api_error import ApiError
from headrace.server.http.body_limits import read_body
from headrace.server.protocols.chat_fields import check_fields, template_variables
from headrace.server.protocols.chat_messages import check_ending, read_messages
from headrace.server.protocols.fields import OFFLINE_IGNORED, OFFLINE_REFUSED, ChatRequest, CompletionRequest
from headrace.server.protocols.sampling import given_fields, not_built
from headrace.server.protocols.structured import asked_form, schema_of
from headrace.server.settings import Limits

LIMITS = Limits(stop=4096, stop_chars=4096)  # the engine's own limits hold; those of a server protect it from its clients


class BodyError(ValueError):
    """A body that is not a request. Its message names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Body:
    """A request: `prompt` holds exactly one of prompt, messages and prompt_token_ids; `template` the arguments of `LLM.render`;
    `ignored` the given fields that have no effect in a file."""

    prompt: dict[str, Any]
    params: dict[str, Any]
    template: dict[str, Any] = field(default_factory=dict)
    tools: ToolChoice | None = None
    ignored: frozenset[str] = frozenset()


def read(body: dict[str, Any], *, chat: bool) -> Body:
    """The request of a body for /v1/chat/completions, or for /v1/completions. Raises BodyError."""
    refused = next((name for name in OFFLINE_REFUSED if body.get(name)), None)
    if refused is not None:
        raise BodyError(f"{refused}: {OFFLINE_REFUSED[refused]}; remove it")
    data = json.dumps({"model": "", **body}).encode()  # a file is for one model, which need not be named
    try:
        return _chat(read_body(data, ChatRequest)) if chat else _completion(read_body(data, CompletionRequest))
    except (ApiError, ToolError) as error:
        raise BodyError(str(error)) from None


def _chat(request: ChatRequest) -> Body:
    check_fields(request)
    check_ending(request)
    if None not in (request.max_tokens, request.max_completion_tokens) and request.max_tokens != request.max_completion_tokens:
        raise BodyError("max_tokens and max_completion_tokens differ; give one")
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    template = template_variables(request)
    for name in ("continue_final_message", "add_generation_prompt"):
        if getattr(request, name) is not None:
            template[name] = getattr(request, name)
    tools = ToolChoice(
        request.tools,
        request.tool_choice,
        request.parallel_tool_calls,
        request.allow_repeated_tool_calls,
        request.open_objects,
    )
    callable_tools(tools)
    return Body(
        {"messages": read_messages(request.messages)},
        _params(request, max_tokens=most, logprobs=(request.top_logprobs or 0) if request.logprobs else None),
        template,
        tools if request.tools or request.tool_choice not in (None, "none", "auto") else None,
        _ignored(request),
    )


def _completion(request: CompletionRequest) -> Body:
    not_built(bool(request.suffix), "suffix", "text cannot be inserted before a suffix")
    return Body(_prompt(request.prompt), _params(request, logprobs=request.logprobs), ignored=_ignored(request))


def _prompt(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise BodyError("prompt must be one text or its token ids; give each text a line of its own")
        prompt = prompt[0]
    return {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}


def _params(request: Any, **more: Any) -> dict[str, Any]:
    given = {**given_fields(request, LIMITS), "structured_outputs": asked_form(request), **more}
    return {name: value for name, value in given.items() if value is not None}


def _ignored(request: Any) -> frozenset[str]:
    return frozenset(name for name in OFFLINE_IGNORED if getattr(request, name) is not None)


def tools_of(llm: Any, asked: ToolChoice, form: StructuredOutputs | None, template: str | None) -> Tooling | None:
    """The tools of a line; `form`: that of an answer without a call; `template`: source of its chat template. Raises
    ToolError."""
    usable, must = callable_tools(asked)
    answer = None
    if usable and form is not None and not must:
        if (schema := schema_of(form)) is None:
            raise ToolError("next to tools the format of an answer is a JSON schema or json_object; remove one", "tools")
        answer = for_mask(prepare(schema, closed=not form.open_objects))
    return tooling(asked, template, llm.tokenizer.control_id, None, answer)
