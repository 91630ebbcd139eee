"""What a request may say: the OpenAI protocol's fields, the sampling fields of other servers, and nothing else.

Every field may be null, which means that it was not given. Fields in `MEANINGLESS` are accepted and do nothing here.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from headrace.server.bounds import (
    BadWords,
    Biases,
    Choices,
    Deadline,
    Ids,
    Int64,
    Items,
    Marks,
    Prompt,
    Prompts,
    Settings,
    Source,
    Stops,
    StopText,
    Strict,
    Texts,
    ToolItems,
    Tools,
    Word,
    Words,
)

Object = dict[str, Any]  # looked at elsewhere, as a whole


class Meaningless(Strict):
    """Accepted for clients that send them; they change nothing here."""

    user: Word | None = None
    metadata: Settings | None = None
    store: bool | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: Settings | None = None
    verbosity: Word | None = None
    prediction: Settings | None = None


class Disguise(Strict):
    """Stream options of /v1/responses. Sizes of events are not disguised here, so it may only be declined."""

    include_obfuscation: Literal[False] | None = None


class StreamOptions(Disguise):
    """Those of the others."""

    include_usage: bool | None = None


class Sampling(Meaningless):
    """How tokens are drawn, in both kinds of completion; what is not given is the model's own setting."""

    model: Word
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Biases | None = None
    stop: StopText | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    # what other servers have as well
    top_k: Int64 | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    no_repeat_ngram: Int64 | None = None
    contrastive_beta: float | None = None
    contrastive_alpha: float | None = None
    penalty_alpha: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Int64 | None = None
    dry_breakers: Ids | None = None
    dry_range: Int64 | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    beam_groups: int | None = None
    diversity_penalty: float | None = None
    length_penalty: float | None = None
    length_rule: Word | None = None
    early_stopping: bool | Word | None = None
    structured_outputs: Settings | None = None
    guided_json: Source | Object | bool | None = None
    guided_regex: Source | None = None
    guided_choice: Choices | None = None
    guided_grammar: Source | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: Ids | None = None
    allowed_token_ids: Ids | None = None
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: Word | None = None
    verification: Word | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | Texts | Prompt | Prompts
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: Items
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Settings | None = None
    # known to the protocol, refused with a reason unless they say nothing
    tools: Tools | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: Tools | None = None
    function_call: Any = None
    response_format: Any = None
    modalities: Words | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: Word | None = None
    moderation: Any = None


class EmbeddingRequest(Meaningless):
    """POST /v1/embeddings: texts or token ids, one or many."""

    model: Word
    input: str | Texts | Prompt | Prompts
    encoding_format: Word | None = None
    dimensions: Int64 | None = None
    pooling: Word | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None


class ResponseRequest(Strict):
    """POST /v1/responses."""

    model: Word
    input: str | Items
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Disguise | None = None
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: Settings | None = None
    tools: ToolItems | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: Words | None = None
    metadata: Marks | None = None
    # what other servers have as well
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: StopText | Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: Settings | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None
    # known to the protocol, refused with a reason unless they say nothing
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    truncation: Word | None = None
    max_tool_calls: int | None = None
    # accepted for clients that send them; they change nothing here
    user: Word | None = None
    reasoning: Settings | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: Settings | None = None


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=200)]
    endpoint: Annotated[str, Field(max_length=200)]
    completion_window: Annotated[str, Field(max_length=20)]
    metadata: Marks | None = None
    output_expires_after: Settings | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation."""

    model: Word | None = None
    prompt: str | None = None
    messages: Items | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: Word | None = None
    tokens: Prompt
