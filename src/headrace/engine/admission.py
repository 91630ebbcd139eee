"""Checks of requests before they enter the loop. A request that could never run is refused with what to change."""

from collections.abc import Mapping
from hashlib import sha256

from headrace.data.config import Audio, EngineConfig
from headrace.data.fields import PROMPT, FieldError, ignored_fields
from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import AMATEUR, CASCADE, FEATURES, HIDDEN, MAX_NODES, TARGET, UPPER, Align, KVGroup
from headrace.data.sources import Frames
from headrace.data.types import Request
from headrace.decoding.base import Strategy
from headrace.decoding.constrained import Constraint, ConstraintError, Grammars
from headrace.decoding.processors import ProcessorError, check_processors
from headrace.decoding.prompts import POOLS, Aligning, Classifying, Pooling
from headrace.decoding.refine import Refine
from headrace.decoding.timestamps import TimestampRules


class AdmissionError(FieldError):
    """A request that could never run; the message contains what to change."""


def with_adapter(salt: bytes, params: SamplingParams, adapters: Mapping[str, bytes]) -> bytes:
    """The salt of a request, its adapter included, so that adapters share no K/V. adapters: digests by name.

    Raises AdmissionError for an unknown adapter.
    """
    if not params.adapter:
        return salt
    if params.adapter not in adapters:
        known = f"this model has {', '.join(adapters)}" if adapters else "open the model with adapter=NAME=PATH"
        raise AdmissionError("adapter", f"unknown adapter {params.adapter[:60]!r}; {known}")
    return sha256(adapters[params.adapter] + salt).digest()


def constraint_of(params: SamplingParams, grammars: Grammars | None, vocab_size: int) -> Constraint | TimestampRules | None:
    """The compiled constraint of a request's outputs or timestamps, None without one. Raises AdmissionError."""
    if params.structured_outputs is None:
        return None if params.timestamps is None else TimestampRules(params.timestamps, vocab_size)
    if grammars is None:
        raise AdmissionError("structured_outputs", "structured_outputs need a tokenizer; load the model with its tokenizer")
    try:
        return grammars.constraint(params.structured_outputs)
    except ConstraintError as error:
        raise AdmissionError("structured_outputs", str(error)) from None


class Limits:
    """The bounds of one engine: context, vocabulary, slots, token budget, blocks.

    mask_id: mask token of a model that fills in masks. start: first token of the decoder of an encoder-decoder that reads text;
    None for other models. audio: windows of sound that the encoder reads. judges: the exits have confidence classifiers.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        *,
        has_tokenizer: bool,
        mask_id: int | None = None,
        start: int | None = None,
        audio: Audio | None = None,
        judges: bool = False,
    ) -> None:
        self.scheduler = config.scheduler
        self.cache = config.cache
        self.vocab_size = vocab_size
        self.has_tokenizer = has_tokenizer
        self.mask_id = mask_id
        self.start = start
        self.audio = audio
        self.judges = judges


def admit(request: Request, limits: Limits) -> None:
    """Set a request's width. Raises AdmissionError unless it can run to its end on this engine."""
    if not isinstance(request.strategy, Strategy):
        raise AdmissionError(
            "strategy", f"{type(request.strategy).__name__} is not a strategy; inherit from headrace.decoding.base.Strategy"
        )
    request.width = request.strategy.width(request)
    _check_prompt(request, limits)
    _check_ids(request, limits)
    _check_processors(request)
    _check_honours(request)
    if isinstance(request.strategy, Refine) and limits.mask_id is None:
        raise AdmissionError(
            "refine_block",
            "refine needs a mask token (mask_token_id in config.json), which this model lacks; leave refine out, or "
            "open a model that was trained so, as by headrace train-masked",
        )
    _check_width(request, limits)
    _check_blocks(request, limits)


def _check_prompt(request: Request, limits: Limits) -> None:
    length, context = len(request.input_ids), limits.scheduler.max_model_len
    _check_frames(request, limits)
    if length == 0:
        what = "the prompt is empty" if limits.start is None else "the source is empty, and an encoder-decoder writes from one"
        raise AdmissionError(PROMPT, f"{what}; give at least one token")
    if limits.start is not None:
        _check_unscored(request)
        _check_length(request, limits)
    elif isinstance(request.strategy, Pooling):
        _check_pool(request, request.strategy.pool, limits)
    elif isinstance(request.strategy, Classifying):
        if not limits.scheduler.whole:
            raise AdmissionError(
                "model", "classification needs an encoder (BERT, MiniLM), and this model is a decoder; open another one"
            )
        _check_length(request, limits)
    elif limits.scheduler.whole:
        raise AdmissionError("model", "this model is an encoder and cannot generate text; request embeddings or classes")
    elif length + _least_answer(request) > context:
        raise AdmissionError(
            PROMPT,
            f"the prompt has {length} tokens and the context holds {context}, the answer included; shorten the prompt"
            + (f", or raise {limits.scheduler.longer}" if limits.scheduler.longer else ""),
        )
    if request.params.prompt_logprobs is not None and request.params.prompt_logprobs_start >= length:
        start = request.params.prompt_logprobs_start
        raise AdmissionError(
            "prompt_logprobs_start",
            f"the prompt has {length} tokens, so none from token {start} on; lower prompt_logprobs_start",
        )
    _check_vocabulary(request, limits)


def _check_unscored(request: Request) -> None:
    """Raise AdmissionError for scores or embeddings of an encoder-decoder."""
    if not _least_answer(request) or request.params.prompt_logprobs is not None:
        raise AdmissionError("model", "an encoder-decoder cannot score or embed its source; request generated text only")


def _check_frames(request: Request, limits: Limits) -> None:
    """Raise AdmissionError unless the request brings a window of sound exactly where the model reads one."""
    frames, audio = request.source if isinstance(request.source, Frames) else None, limits.audio
    if frames is None and audio is None and not isinstance(request.strategy, Aligning):
        return
    if audio is None:
        raise AdmissionError("model", "this model reads no sound; open a speech model, such as whisper-base")
    if frames is None:
        raise AdmissionError("model", "this model transcribes sound and reads no text; use headrace transcribe")
    whole = frames.bins == audio.bins and len(frames.rows) == 8 * audio.bins * frames.positions
    if not whole or not 0 < frames.positions <= audio.positions:
        raise AdmissionError(
            "model",
            f"a window of this model has up to {audio.rows} rows of {audio.bins} float32 values, an even number of rows",
        )
    if isinstance(request.strategy, Aligning):
        _check_aligned(request, request.strategy.wanted, audio)
    else:
        _check_unscored(request)


def _check_aligned(request: Request, want: Align, audio: Audio) -> None:
    """Raise AdmissionError for an alignment of no tokens, or with positions that a window does not have."""
    if not 0 <= want.first < len(request.prompt) - 1 or not 0 < want.positions <= audio.positions or not want.heads:
        raise AdmissionError(PROMPT, f"an alignment takes heads, tokens, and 1 to {audio.positions} positions")


def _check_vocabulary(request: Request, limits: Limits) -> None:
    for token in request.input_ids:
        if not isinstance(token, int) or not 0 <= token < limits.vocab_size:
            raise AdmissionError(PROMPT, f"prompt token {token!r} is not in the vocabulary (0 to {limits.vocab_size - 1})")


def _least_answer(request: Request) -> int:
    """Least number of tokens that a request outputs: 0 for scores, embeddings and classes, otherwise 1."""
    return int(request.strategy.generates)


def _check_pool(request: Request, pool: str, limits: Limits) -> None:
    if pool not in POOLS:
        raise AdmissionError("pooling", f"unknown pooling {pool!r}; use {', '.join(POOLS)}")
    if pool == "first" and not limits.scheduler.whole:
        raise AdmissionError("pooling", "the first token of a decoder sees no other; pool mean or last")
    _check_length(request, limits)


def _check_length(request: Request, limits: Limits) -> None:
    context = limits.scheduler.max_model_len
    length = len(request.input_ids)
    if length > context:
        raise AdmissionError(PROMPT, f"the text has {length} tokens and the model takes {context}; shorten it")


def _check_ids(request: Request, limits: Limits) -> None:
    params = request.params
    try:
        params.check_vocab(limits.vocab_size)
    except ParamError as error:
        raise AdmissionError(error.field, str(error)) from None
    if params.stop and not limits.has_tokenizer:
        raise AdmissionError("stop", "stop strings need a tokenizer; use stop_token_ids, or load the model with its tokenizer")


def _check_honours(request: Request) -> None:
    """Refuse parameters that the strategy would ignore."""
    honours: frozenset[str] = request.strategy.honours
    given = ignored_fields(request.params, honours)
    if request.processors and "processors" not in honours:
        given.append("processors")
    if given:
        name = type(request.strategy).__name__
        raise AdmissionError("strategy", f"the strategy {name} does not use {', '.join(given)}; leave these fields out")


def _check_processors(request: Request) -> None:
    try:
        check_processors(request.processors)
    except ProcessorError as error:
        raise AdmissionError("processors", str(error)) from None
    stateful = any(processor.scope == "stateful" for processor in request.processors)
    if stateful and request.params.leaves:
        name = "exit_threshold" if request.params.cascade_threshold is None else "cascade_threshold"
        raise AdmissionError(name, f"a stateful logit processor sees every token's logits once; leave {name} out")
    if request.width > 1 and stateful:
        raise AdmissionError("n", "a stateful logit processor follows one output; set n to 1, or give it scope 'path'")


def groups_filled(params: SamplingParams, groups: tuple[KVGroup, ...], judges: bool = False) -> int:
    """Bit mask of the KV groups that a request's feeds fill. Raises AdmissionError if the engine lacks one. judges: the exits
    have confidence classifiers."""
    # Heads may draft for any request, and any request may find another's prefix.
    needed = {TARGET.name, FEATURES, UPPER}
    if params.exit_threshold is not None:
        _check_exits(params, groups, judges)
    if params.cascade_threshold is not None:
        needed.add(CASCADE)
    if params.combined is not None:
        needed.add(AMATEUR)
    if params.penalty_alpha:
        needed.add(HIDDEN)
    if AMATEUR in needed and all(group.name != AMATEUR for group in groups):
        name = "contrastive_beta" if params.defer_rule is None else "defer_rule"
        raise AdmissionError(name, f"{name} needs an amateur; open the model with amateur=MODEL, or leave it out")
    if CASCADE in needed and all(group.name != CASCADE for group in groups):
        raise AdmissionError(
            "cascade_threshold", "cascade_threshold needs a smaller model; open the model with cascade=MODEL, or leave it out"
        )
    if HIDDEN in needed and all(group.name != HIDDEN for group in groups):
        raise AdmissionError(
            "penalty_alpha", "this engine keeps no hidden states for contrastive search; leave penalty_alpha out"
        )
    return sum(1 << g for g, group in enumerate(groups) if group.name in needed)


def _check_exits(params: SamplingParams, groups: tuple[KVGroup, ...], judges: bool) -> None:
    upper = next((group for group in groups if group.name == UPPER and group.layers), None)
    if upper is None:
        raise AdmissionError("exit_threshold", "exit_threshold needs exits; open the model with exits=FOLDER, or leave it out")
    if params.exit_criterion == "saturation" and upper.layers[0] < 2:
        raise AdmissionError(
            "exit_criterion", "saturation compares two layers, and this exit is after the first one; use max_prob or margin"
        )
    if params.exit_criterion == "classifier" and not judges:
        raise AdmissionError(
            "exit_criterion", "these exits have no classifier; use max_prob or margin, or train them again: train-heads"
        )


def _check_width(request: Request, limits: Limits) -> None:
    most = min(limits.scheduler.max_num_seqs, limits.scheduler.max_num_batched_tokens)
    if request.width > most:
        raise AdmissionError(
            "n",
            f"the request needs {request.width} sequences at once and the engine runs {most}; "
            "lower n, or raise max_num_seqs and max_num_batched_tokens",
        )


def blocks_needed(prompt_len: int, output_len: int, width: int, block_size: int, source: int = 0) -> int:
    """Largest number of blocks that a request can hold. Its sequences share the full blocks of the prompt and the blocks of
    the source, and nothing else."""
    shared = prompt_len // block_size
    each = -(-(prompt_len + output_len - 1) // block_size) - shared
    return shared + width * max(each, 0) + -(-source // block_size)


def _check_blocks(request: Request, limits: Limits) -> None:
    prompt, source = len(request.prompt), 0 if request.source is None else request.source.positions
    room = limits.scheduler.max_model_len - prompt
    output = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
    output = output if _least_answer(request) else 1
    nodes: int = request.strategy.nodes(request)
    if nodes > MAX_NODES:
        raise AdmissionError(
            "strategy", f"the strategy drafts up to {nodes} nodes and a step verifies {MAX_NODES}; let its nodes() be fewer"
        )
    if nodes + request.width > limits.scheduler.max_num_batched_tokens:
        raise AdmissionError(
            "top_k",
            f"the request feeds {nodes} tokens of its own a step; lower top_k or refine_block, or raise max_num_batched_tokens",
        )
    need = blocks_needed(prompt, output + nodes, request.width, limits.cache.block_size, source)
    if need > limits.cache.num_blocks:
        raise AdmissionError(
            "n",
            f"the request may need {need} KV blocks of {limits.cache.block_size} tokens and the pool has "
            f"{limits.cache.num_blocks}; lower n or max_tokens, or raise kv_cache_memory",
        )
