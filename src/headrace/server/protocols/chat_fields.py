"""Checks of a chat request's fields that need no model. The server and `headrace generate` share them."""

from typing import Any

from headrace.server.http.api_error import bad
from headrace.server.protocols.fields import ChatRequest
from headrace.server.protocols.sampling import not_built

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's; a template reads the one it gets
# Names that chat_template_kwargs may not set: the server sets them, or they belong to the template language.
RESERVED = frozenset(
    "messages tools documents add_generation_prompt bos_token eos_token "
    "raise_exception strftime_now range dict lipsum cycler joiner namespace".split()
)


CHAT_TEMPLATE = "chat_template"  # in chat_template_kwargs: the name of one of the model's templates


def check_fields(request: ChatRequest) -> None:
    """Check fields that depend on each other, or that ask for something not built. Raises ApiError."""
    not_built(bool(request.functions), "functions", "they are called tools now; use tools")
    not_built(request.function_call not in (None, "none", "auto"), "function_call", "it is called tool_choice now")
    not_built(request.modalities not in (None, ["text"]), "modalities", "this server writes text alone")
    not_built(request.audio is not None, "audio", "this server writes text alone")
    not_built(request.web_search_options is not None, "web_search_options", "this server does not search")
    not_built(request.moderation is not None, "moderation", "this server does not moderate")
    if request.reasoning_effort not in (None, *EFFORTS):
        message = f"reasoning_effort must be one of {', '.join(EFFORTS)}, not {request.reasoning_effort[:40]!r}"
        raise bad(message, "reasoning_effort")
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options goes with stream: true", "stream_options")
    if request.top_logprobs is not None and not request.logprobs:
        raise bad("top_logprobs goes with logprobs: true", "top_logprobs")
    if request.top_logprobs is not None and request.top_logprobs < 0:
        raise bad(f"top_logprobs must be 0 or more, not {request.top_logprobs}", "top_logprobs")


def template_variables(request: ChatRequest) -> dict[str, Any]:
    """Variables that the request gives to the chat template. Raises ApiError."""
    variables = dict(request.chat_template_kwargs or {})
    if taken := RESERVED & set(variables):
        raise bad(f"chat_template_kwargs may not set {', '.join(sorted(taken))}; leave it out", "chat_template_kwargs")
    if not isinstance(variables.get(CHAT_TEMPLATE), str | None):
        message = f"{CHAT_TEMPLATE} in chat_template_kwargs must be the name of one of the model's templates"
        raise bad(message, "chat_template_kwargs")
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables
