"""The body of a line in OpenAI's batch format, read with the server's types and checks: both accept the same fields.

The exceptions are the fields in `server.protocols.fields.OFFLINE_IGNORED` and `OFFLINE_REFUSED`.
"""

import json
from typing import Any

from headrace.data.structured import StructuredOutputs
from headrace.decoding.json_schema.prepare import prepare
from headrace.decoding.tools import ToolChoice, ToolError, Tooling, callable_tools, for_mask, tooling
from headrace.server.http.api_error import ApiError
from headrace.server.http.batch_lines import LineError
from headrace.server.http.body_limits import read_body
from headrace.server.protocols import chat, completions
from headrace.server.protocols.chat_messages import check_ending, read_messages
from headrace.server.protocols.fields import OFFLINE_IGNORED, OFFLINE_REFUSED, ChatRequest, CompletionRequest
from headrace.server.protocols.generation import GenerationRequest
from headrace.server.protocols.prompts import Conversation, Texts
from headrace.server.protocols.sampling import given_fields
from headrace.server.protocols.structured import requested_format, schema_of
from headrace.server.settings import Limits

# Limits of a server protect it from its clients. Stop strings of a file get wide ones; the engine's own limits still hold.
LIMITS = Limits(stop=4096, stop_chars=4096)


def read(body: dict[str, Any], *, is_chat: bool) -> dict[str, Any]:
    """Fields of the `BatchRequest` in a body for /v1/chat/completions, or for /v1/completions. Raises LineError."""
    refused = next((name for name in OFFLINE_REFUSED if body.get(name)), None)
    if refused is not None:
        raise LineError(f"{refused}: {OFFLINE_REFUSED[refused]}; remove it")
    # A file is for one model, which need not be named.
    data = json.dumps({"model": "", **body}).encode()
    try:
        if is_chat:
            return _fields(chat.read(read_body(data, ChatRequest)))
        return _fields(completions.read(read_body(data, CompletionRequest)))
    except (ApiError, ToolError) as error:
        raise LineError(str(error)) from None


def _fields(request: GenerationRequest) -> dict[str, Any]:
    sampling, prompt = request.sampling, request.prompt
    params = {
        **given_fields(sampling, LIMITS),
        "structured_outputs": requested_format(sampling, request.response_format, sampling.open_objects),
        "max_tokens": request.max_tokens,
        "logprobs": request.logprobs,
    }
    params = {name: value for name, value in params.items() if value is not None}
    ignored = frozenset(name for name in OFFLINE_IGNORED if getattr(sampling, name) is not None)
    fields = {"params": params, "ignored": ignored}
    if isinstance(prompt, Texts):
        return fields | _prompt(prompt)
    assert isinstance(prompt, Conversation)
    check_ending(prompt.messages, prompt.continue_final_message, prompt.add_generation_prompt)
    variables = prompt.variables()
    template: dict[str, Any] = {"chat_template_kwargs": variables} if variables else {}
    for name in ("continue_final_message", "add_generation_prompt"):
        if (value := getattr(prompt, name)) is not None:
            template[name] = value
    callable_tools(prompt.tools)
    calls = prompt.tools.tools or prompt.tools.tool_choice not in (None, "none", "auto")
    tools = prompt.tools if calls else None
    return fields | {"messages": read_messages(prompt.messages), "template": template, "tools": tools}


def _prompt(texts: Texts) -> dict[str, Any]:
    prompts = texts.prompts()
    if len(prompts) > 1:
        raise LineError("prompt must be one text or its token ids; give each text a line of its own")
    prompt = prompts[0] if prompts else []
    return {"prompt_token_ids" if isinstance(prompt, list) else "prompt": prompt}


def tools_of(llm: Any, asked: ToolChoice, form: StructuredOutputs | None, template: str | None) -> Tooling | None:
    """The tools of a line. `form`: the format of an answer without a call; `template`: source of the chat template.

    Raises ToolError.
    """
    usable, must = callable_tools(asked)
    answer = None
    if usable and form is not None and not must:
        if (schema := schema_of(form)) is None:
            raise ToolError("next to tools the format of an answer is a JSON schema or json_object; remove one", "tools")
        answer = for_mask(prepare(schema, closed=not form.open_objects))
    return tooling(asked, template, llm.tokenizer.control_id, None, answer)
