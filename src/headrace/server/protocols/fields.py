"""What a request may say: the OpenAI protocol's fields, the sampling fields of other servers, and nothing else.

Every field may be null, which means that it was not given. Fields in `MEANINGLESS` are accepted and do nothing here.
"""

from itertools import chain
from typing import Annotated, Any, Literal, get_origin

from msgspec import Meta, Struct, defstruct

from headrace.data.fields import BIASES, ID_LISTS, IDS, TEXTS, Declared, declared
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams
from headrace.server.http.limits_check import (
    Choices,
    Deadline,
    IgnoredFields,
    Int32,
    Int64,
    Items,
    Marks,
    Name,
    Prompt,
    Prompts,
    Salt,
    Seed,
    Settings,
    Source,
    StopText,
    StrictStruct,
    TokenId,
    ToolItems,
    Tools,
    Word,
    Words,
    check_same_kind,
)

Object = dict[str, Any]  # looked at elsewhere, as a whole


class Disguise(StrictStruct, kw_only=True):
    """Stream options of /v1/responses. Sizes of events are not disguised here, so it may only be declined."""

    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation: must be false; the sizes of events are not disguised here")


class StreamOptions(Disguise, kw_only=True):
    """Stream options of both kinds of completion; `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None  # a last chunk with the usage
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk


# What `headrace generate` does otherwise than the server with the fields of a batch line; all others mean the same in both.
OFFLINE_IGNORED = frozenset({"deadline", "cache_salt"})  # a file has no client that waits, and one owner
OFFLINE_REFUSED = {
    "stream": "a file of answers is not streamed",  # a batch of the server refuses it, too
    "echo": "the record of an answer has no place for its prompt",
}


def http_type(one: Declared) -> Any:
    """What a body may hold for a declared field; its bounds are looked at later, but for those of lists."""
    most, each = Meta(max_length=one.field.most), Meta(max_length=one.field.each)
    kinds = {
        int: Int32,
        float: float,
        bool: bool,
        bool | Literal["never"]: bool | Word,
        TEXTS: StopText | Annotated[list[StopText], most],
        IDS: Annotated[list[TokenId], most],
        ID_LISTS: Annotated[list[Annotated[list[TokenId], each]], most],
        BIASES: Annotated[dict[Word, float], most],
    }
    return Word if get_origin(one.kind) is Literal else kinds[one.kind]


def http_fields(*structs: type[Struct]) -> dict[str, Any]:
    """What a protocol has under the names of our own parameters, all of which may be left out: name -> type."""
    return {
        one.flat: http_type(one) | None
        for one in chain.from_iterable(map(declared, structs))
        if one.field.doc and one.field.http
    }


def struct_of(name: str, fields: dict[str, Any], base: type[StrictStruct]) -> Any:
    """A base of requests with these fields, None where they are not given."""
    return defstruct(name, [(field, kind, None) for field, kind in fields.items()], bases=(base,), kw_only=True)


SAMPLING_FIELDS = http_fields(SamplingParams, BeamSearchParams, RefineParams)
SamplingFields: Any = struct_of("SamplingFields", SAMPLING_FIELDS, IgnoredFields)
# Those of /v1/responses.
RESPONSE_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p stop presence_penalty frequency_penalty repetition_penalty priority".split()
)
ResponseSampling: Any = struct_of(
    "ResponseSampling", {name: SAMPLING_FIELDS[name] for name in RESPONSE_SAMPLING_FIELDS}, StrictStruct
)


class Sampling(SamplingFields, kw_only=True):  # type: ignore[call-arg]
    """How tokens are drawn, in both kinds of completion; what is not given is the model's own setting."""

    model: Word
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    # what other servers have as well
    use_beam_search: bool | None = None
    structured_outputs: Settings | None = None
    open_objects: bool | None = None  # an extension: JSON objects may have properties that their schema does not list
    return_exits: bool | None = None
    guided_json: Source | Object | bool | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None


class CompletionRequest(Sampling, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int32 | None = None
    suffix: str | None = None

    def __post_init__(self) -> None:
        check_same_kind("prompt", self.prompt)


class ChatRequest(Sampling, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/chat/completions."""

    messages: Items
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Settings | None = None
    # known to the protocol, refused with a reason unless they say nothing
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    allow_repeated_tool_calls: bool | None = None  # an extension: calls equal to earlier ones do not end the answer
    functions: Tools | None = None
    function_call: Any = None
    response_format: Any = None
    modalities: Words | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: Word | None = None
    moderation: Any = None


class EmbeddingRequest(IgnoredFields, kw_only=True):
    """POST /v1/embeddings: texts or token ids, one or many."""

    model: Word
    input: Prompts
    encoding_format: Word | None = None
    dimensions: Int64 | None = None
    pooling: Word | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check_same_kind("input", self.input)


class ClassifyRequest(IgnoredFields, kw_only=True):
    """POST /v1/classify: texts or token ids, one or many; the model's own rule where none is given."""

    model: Word
    input: Prompts
    criterion: Word | None = None
    threshold: float | None = None
    return_exits: bool | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check_same_kind("input", self.input)


class ResponseRequest(ResponseSampling, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/responses."""

    model: Word
    input: str | Items
    instructions: str | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Disguise | None = None
    max_output_tokens: Int64 | None = None
    top_logprobs: Int32 | None = None
    text: Settings | None = None
    tools: ToolItems | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    allow_repeated_tool_calls: bool | None = None
    open_objects: bool | None = None
    include: Words | None = None
    metadata: Marks | None = None
    # what other servers have as well
    seed: Seed | None = None
    chat_template_kwargs: Settings | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None
    # known to the protocol, refused with a reason unless they say nothing
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    truncation: Word | None = None
    max_tool_calls: Int32 | None = None
    # accepted for clients that send them; they change nothing here
    user: Word | None = None
    reasoning: Settings | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: Settings | None = None


class InputTokensRequest(StrictStruct, kw_only=True):
    """POST /v1/responses/input_tokens: the fields of a response that its prompt depends on."""

    model: Word
    input: str | Items
    instructions: str | None = None
    previous_response_id: Name | None = None
    text: Settings | None = None
    tools: ToolItems | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Settings | None = None
    truncation: Word | None = None
    conversation: Any = None
    chat_template_kwargs: Settings | None = None


class BatchRequest(StrictStruct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: Name
    endpoint: Name
    completion_window: Word
    metadata: Marks | None = None
    output_expires_after: Settings | None = None


class TokenizeRequest(StrictStruct, kw_only=True):
    """POST /tokenize: a text, or a conversation with what its prompt depends on."""

    model: Word | None = None
    prompt: str | None = None
    messages: Items | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Tools | None = None
    tool_choice: Any = None
    chat_template_kwargs: Settings | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(StrictStruct, kw_only=True):
    """POST /detokenize."""

    model: Word | None = None
    tokens: Prompt
