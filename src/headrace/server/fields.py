"""What a request may say: the OpenAI protocol's fields, the sampling fields of other servers, and nothing else.

Every field may be null, which means that it was not given. Fields in `MEANINGLESS` are accepted and do nothing here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Deadline = Annotated[float, Field(gt=0, le=86_400)]  # seconds
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Strict(BaseModel):
    """Types are meant (no "1" for 1), and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class Meaningless(Strict):
    """Accepted for clients that send them; they change nothing here."""

    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    verbosity: str | None = None
    prediction: dict[str, Any] | None = None


class Disguise(Strict):
    """Stream options of /v1/responses. Sizes of events are not disguised here, so it may only be declined."""

    include_obfuscation: Literal[False] | None = None


class StreamOptions(Disguise):
    """Those of the others."""

    include_usage: bool | None = None


class Sampling(Meaningless):
    """How tokens are drawn, in both kinds of completion; what is not given is the model's own setting."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
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
    dry_breakers: list[TokenId] | None = None
    dry_range: Int64 | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    beam_groups: int | None = None
    diversity_penalty: float | None = None
    length_penalty: float | None = None
    length_rule: str | None = None
    early_stopping: bool | str | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    min_tokens: Int64 | None = None
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[list[TokenId]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs_mode: str | None = None
    verification: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None


class CompletionRequest(Sampling):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # known to the protocol, refused with a reason unless they say nothing
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    response_format: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: str | None = None
    moderation: Any = None


class EmbeddingRequest(Meaningless):
    """POST /v1/embeddings: texts or token ids, one or many."""

    model: str
    input: str | list[str] | list[TokenId] | list[list[TokenId]]
    encoding_format: str | None = None
    dimensions: Int64 | None = None
    pooling: str | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None


class ResponseRequest(Strict):
    """POST /v1/responses."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: Disguise | None = None
    max_output_tokens: Int64 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    # what other servers have as well
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    deadline: Deadline | None = None
    # known to the protocol, refused with a reason unless they say nothing
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    truncation: str | None = None
    max_tool_calls: int | None = None
    # accepted for clients that send them; they change nothing here
    user: str | None = None
    reasoning: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class BatchRequest(Strict):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=200)]
    endpoint: Annotated[str, Field(max_length=200)]
    completion_window: Annotated[str, Field(max_length=20)]
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    output_expires_after: dict[str, Any] | None = None


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
