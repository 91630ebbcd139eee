"""Fields of request bodies: those of the OpenAI protocol, and the sampling fields of other servers. Others are refused.

A null field counts as missing. The fields of `IgnoredFields` are accepted and have no effect.
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

# Of one request; Limits.inputs is lower.
RERANK_DOCUMENTS = 1 << 16
# A JSON object that is checked where it is used.
Object = dict[str, Any]


class Disguise(StrictStruct, kw_only=True):
    """Stream options of /v1/responses. The server does not obfuscate event sizes, so the field may only be false."""

    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None

    def __post_init__(self) -> None:
        if self.include_obfuscation:
            raise ValueError("include_obfuscation: must be false; the sizes of events are not disguised here")


class StreamOptions(Disguise, kw_only=True):
    """Stream options of both kinds of completion; `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None  # one more chunk at the end, with the usage
    continuous_usage_stats: bool | None = None  # every chunk has the usage so far


# Fields that the server does not support, by protocol: name -> values without an effect, and why others are refused.
Unsupported = dict[str, tuple[tuple[Any, ...], str]]
CHAT_UNSUPPORTED: Unsupported = {
    "functions": ((None, []), "they are called tools now; use tools"),
    "function_call": ((None, "none", "auto"), "it is called tool_choice now"),
    "modalities": ((None, ["text"]), "this server writes text alone"),
    "audio": ((None,), "this server writes text alone"),
    "web_search_options": ((None,), "this server does not search"),
    "moderation": ((None,), "this server does not moderate"),
}
COMPLETION_UNSUPPORTED: Unsupported = {"suffix": ((None, ""), "text cannot be inserted before a suffix")}
RESPONSE_UNSUPPORTED: Unsupported = {
    "background": ((None, False), "answers are given at once; a batch waits"),
    "conversation": ((None,), "conversations are gone on with by previous_response_id"),
    "prompt": ((None,), "there are no prompt templates here"),
    "moderation": ((None,), "this server does not moderate"),
    "max_tool_calls": (
        (None,),
        "there are no built-in tools, whose calls it would count; parallel_tool_calls: false allows one call",
    ),
    "truncation": ((None, "disabled"), "nothing is cut off silently"),
}
# Fields of a batch line that `headrace generate` treats differently from the server. A file has one owner and no client, so it
# ignores these.
OFFLINE_IGNORED = frozenset({"deadline", "cache_salt"})
OFFLINE_REFUSED = {
    "stream": "a file of answers is not streamed",
    "echo": "the record of an answer has no place for its prompt",
}


def http_type(one: Declared) -> Any:
    """The type of a declared field in a request body. Bounds of numbers are checked later; those of lists here."""
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
    """Fields with the names of the engine's own parameters, all optional: name -> type."""
    return {
        one.flat: http_type(one) | None
        for one in chain.from_iterable(map(declared, structs))
        if one.field.doc and one.field.http
    }


def struct_of(name: str, fields: dict[str, Any], base: type[StrictStruct]) -> Any:
    """A base struct with these fields, all with the default None."""
    return defstruct(name, [(field, kind, None) for field, kind in fields.items()], bases=(base,), kw_only=True)


SAMPLING_FIELDS = http_fields(SamplingParams, BeamSearchParams, RefineParams)
SamplingFields: Any = struct_of("SamplingFields", SAMPLING_FIELDS, IgnoredFields)
# The subset of /v1/responses.
RESPONSE_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p stop presence_penalty frequency_penalty repetition_penalty priority".split()
)
ResponseSampling: Any = struct_of(
    "ResponseSampling", {name: SAMPLING_FIELDS[name] for name in RESPONSE_SAMPLING_FIELDS}, StrictStruct
)


class Sampling(SamplingFields, kw_only=True):  # type: ignore[call-arg]
    """Sampling fields of text generation. A missing field has the model's own setting."""

    model: Word
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Seed | None = None
    # from other servers
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
    # checked by the parser of tools; or not supported, and refused unless they have no effect
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
    prompt_name: Word | None = None
    input_type: Word | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None

    def __post_init__(self) -> None:
        check_same_kind("input", self.input)
        if self.prompt_name is not None and self.input_type is not None:
            raise ValueError("input_type: is another name of prompt_name; give one of them")


class RerankDocument(StrictStruct, kw_only=True):
    """A document of /v1/rerank in the form {"text": …}."""

    text: str


class RerankRequest(IgnoredFields, kw_only=True):
    """POST /v1/rerank: documents in the order of their relevance to a query. The fields are those of Jina and Cohere."""

    model: Word
    query: str
    documents: Annotated[list[str | RerankDocument], Meta(max_length=RERANK_DOCUMENTS)]
    top_n: Int32 | None = None
    return_documents: bool | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None


class ClassifyRequest(IgnoredFields, kw_only=True):
    """POST /v1/classify: texts or token ids, one or many. Without a criterion the model's own rule applies."""

    model: Word
    input: Prompts
    criterion: Word | None = None
    threshold: float | Annotated[tuple[float, ...], Meta(max_length=1024)] | None = None
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
    # from other servers
    seed: Seed | None = None
    chat_template_kwargs: Settings | None = None
    cache_salt: Salt | None = None
    deadline: Deadline | None = None
    # not supported, refused unless they have no effect
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    truncation: Word | None = None
    max_tool_calls: Int32 | None = None
    # accepted without effect, but for reasoning.effort
    user: Word | None = None
    reasoning: Settings | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: Settings | None = None


class InputTokensRequest(StrictStruct, kw_only=True):
    """POST /v1/responses/input_tokens: the fields that the prompt of a response depends on."""

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
    """POST /tokenize: a text, or a conversation with the fields that its prompt depends on."""

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
