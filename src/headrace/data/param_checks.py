"""What the values of request parameters may be, field by field; `headrace.data.params` says what they mean."""

from typing import Any

MAX_N = 64
MAX_LOGPROBS = 64
MAX_STOP = 64
DRY_LONGEST = 64  # tokens of a repetition that are counted
# The filters, each with the value that lets all tokens through.
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0}
VERIFICATIONS = ("noise", "rejection", "block")
MAX_CANDIDATES = 64  # nodes of a draft tree

# Who heeds a field of SamplingParams. The loop itself, whatever the strategy:
COMMON = frozenset(
    "max_tokens stop stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens seed priority".split()
)
# A `Sample` want, by itself:
DRAWN = frozenset(
    (
        "temperature top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold repetition_penalty presence_penalty "
        "frequency_penalty no_repeat_ngram dry_multiplier dry_base dry_allowed_length dry_breakers dry_range contrastive_beta "
        "contrastive_alpha logit_bias bad_words allowed_token_ids structured_outputs min_tokens"
    ).split()
)
# The methods that are chosen by a field:
BEAMS = frozenset("beam temperature n min_tokens structured_outputs".split())
SEARCH = frozenset("penalty_alpha top_k min_tokens".split())
# Values that say nothing, beside the defaults, and fields that say nothing without another one.
_NEUTRAL: dict[str, tuple[object, ...]] = {"temperature": (0,), "best_of": (1,)}
_DETAILS = frozenset(
    "xtc_threshold mirostat_eta dry_base dry_allowed_length dry_breakers dry_range contrastive_alpha logprobs_mode".split()
)


class ParamError(ValueError):
    """A parameter no request can have; the message says which and what to change."""


def as_tuple(name: str, value: object) -> object:
    """Lists become tuples, lists of lists too, and a single string a tuple of one."""
    if value is None and name == "allowed_token_ids":
        return None
    if isinstance(value, str):
        return (value,)
    require(isinstance(value, (list, tuple)), f"{name} must be a list, not {value!r}")
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)  # type: ignore[attr-defined]


def require(ok: bool, message: str) -> None:
    if not ok:
        raise ParamError(message)


def unheeded(params: Any, honours: frozenset[str]) -> list[str]:
    """The fields that are set and would be dropped by a method that heeds those in `honours`, and what the loop does."""
    heeded = COMMON | _DETAILS | honours
    return [
        name
        for name, default in zip(params.__struct_fields__, params.__struct_defaults__, strict=True)
        if name not in heeded and getattr(params, name) not in (default, *_NEUTRAL.get(name, ()))
    ]


def check_types(params: Any) -> None:
    """Numbers, flags and integers are such."""
    for name in _FLOATS:
        value = getattr(params, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(number or (name in _OPTIONAL_FLOATS and value is None), f"{name} must be a number, not {value!r}")
    for name in _FLAGS:
        value = getattr(params, name)
        require(isinstance(value, bool), f"{name} must be true or false, not {value!r}")
    for name in _INTS:
        value = getattr(params, name)
        optional = name in _OPTIONAL_INTS and value is None
        require(
            optional or (isinstance(value, int) and not isinstance(value, bool)),
            f"{name} must be an integer{' or None' if name in _OPTIONAL_INTS else ''}, not {value!r}",
        )
        if name != "seed" and value is not None:
            require(abs(value) < 2**31, f"{name} must be at most 2**31 - 1, not {value}")


def check_ranges(params: Any) -> None:
    """Everything else; raises ParamError, naming the field."""
    require(1 <= params.n <= MAX_N, f"n must be between 1 and {MAX_N}, not {params.n}")
    require(0.0 <= params.temperature <= 100.0, f"temperature must be between 0 and 100, not {params.temperature}")
    require(params.top_k >= 0, f"top_k must be 0 (off) or more, not {params.top_k}")
    for name in ("top_p", "typical_p"):
        value = getattr(params, name)
        require(0.0 < value <= 1.0, f"{name} must be above 0 and at most 1, not {value}")
    require(0.0 <= params.min_p <= 1.0, f"min_p must be between 0 and 1, not {params.min_p}")
    require(
        0.01 <= params.repetition_penalty <= 10.0,
        f"repetition_penalty must be between 0.01 and 10 (1 is off), not {params.repetition_penalty}",
    )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        require(-2.0 <= value <= 2.0, f"{name} must be between -2 and 2, not {value}")
    check_samplers(params)
    require(0 <= params.no_repeat_ngram <= 64, f"no_repeat_ngram must be between 0 and 64, not {params.no_repeat_ngram}")
    require(params.min_tokens >= 0, f"min_tokens must be 0 or more, not {params.min_tokens}")
    if params.max_tokens is not None:
        require(params.max_tokens >= 1, f"max_tokens must be 1 or more, not {params.max_tokens}")
        require(
            params.min_tokens <= params.max_tokens,
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})",
        )
    require(
        params.best_of is None or params.n <= params.best_of <= MAX_N,
        f"best_of must be between n ({params.n}) and {MAX_N}, not {params.best_of}",
    )
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        require(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}")
    require(
        params.logprobs_mode in ("raw", "processed"), f"logprobs_mode must be raw or processed, not {params.logprobs_mode!r}"
    )
    require(params.seed is None or 0 <= params.seed < 2**64, f"seed must be between 0 and 2**64 - 1, not {params.seed}")
    require(
        params.verification in VERIFICATIONS,
        f"verification must be one of {', '.join(VERIFICATIONS)}, not {params.verification!r}",
    )
    require(
        params.verification == "noise" or not params.mirostat_tau,
        "mirostat steers by what was drawn, which a draft does not know; leave verification at noise",
    )
    check_contrast(params)
    check_lists(params)


def check_samplers(params: Any) -> None:
    """DRY, XTC, top-n-sigma and mirostat."""
    require(0.0 <= params.dry_multiplier <= 100.0, f"dry_multiplier must be between 0 and 100, not {params.dry_multiplier}")
    require(1.0 <= params.dry_base <= 10.0, f"dry_base must be between 1 and 10, not {params.dry_base}")
    require(
        1 <= params.dry_allowed_length <= DRY_LONGEST,
        f"dry_allowed_length must be between 1 and {DRY_LONGEST}, not {params.dry_allowed_length}",
    )
    require(params.dry_range >= 0, f"dry_range must be 0 (all) or more, not {params.dry_range}")
    require(0.0 <= params.top_n_sigma <= 100.0, f"top_n_sigma must be between 0 (off) and 100, not {params.top_n_sigma}")
    for name in ("xtc_probability", "xtc_threshold"):
        value = getattr(params, name)
        require(0.0 <= value <= 1.0, f"{name} must be between 0 and 1, not {value}")
    require(0.0 <= params.mirostat_tau <= 100.0, f"mirostat_tau must be between 0 (off) and 100, not {params.mirostat_tau}")
    require(0.0 <= params.mirostat_eta <= 1.0, f"mirostat_eta must be between 0 and 1, not {params.mirostat_eta}")
    if params.mirostat_tau:
        require(not params.greedy, "mirostat_tau steers a draw and needs a temperature of 0.01 or more")
        for name, neutral in FILTERS.items():
            require(getattr(params, name) == neutral, f"mirostat_tau chooses the tokens itself; set {name} to {neutral}")


def check_contrast(params: Any) -> None:
    """Contrastive decoding and search."""
    beta = params.contrastive_beta
    require(beta is None or 0.0 <= beta <= 10.0, f"contrastive_beta must be between 0 and 10, not {beta}")
    require(
        0.0 <= params.contrastive_alpha <= 1.0, f"contrastive_alpha must be between 0 and 1, not {params.contrastive_alpha}"
    )
    require(0.0 <= params.penalty_alpha < 1.0, f"penalty_alpha must be at least 0 and below 1, not {params.penalty_alpha}")
    require(beta is None or params.prompt_logprobs is None, "prompt_logprobs are of one model; leave contrastive_beta out")
    if not params.penalty_alpha:
        return
    require(
        2 <= params.top_k <= MAX_CANDIDATES,
        f"contrastive search needs top_k between 2 and {MAX_CANDIDATES} (its candidates), not {params.top_k}; try 4",
    )
    require(params.n == 1, "contrastive search has one answer; set n to 1, or penalty_alpha to 0")
    given = unheeded(params, SEARCH)
    require(
        not given,
        f"contrastive search chooses by probability and likeness alone; leave out {', '.join(given)}, or penalty_alpha",
    )


def check_lists(params: Any) -> None:
    """Stop strings, biases, lists of ids."""
    require(len(params.stop) <= MAX_STOP, f"at most {MAX_STOP} stop strings, not {len(params.stop)}")
    require(all(isinstance(s, str) and s for s in params.stop), "stop strings must be non-empty text; remove the empty one")
    require(
        params.logit_bias is None or isinstance(params.logit_bias, dict),
        f"logit_bias must map token ids to numbers, not {params.logit_bias!r}",
    )
    for word in params.bad_words:
        require(isinstance(word, tuple), f"bad_words must be lists of token ids, not {word!r}")
        require(bool(word), "each of bad_words needs at least one token; remove the empty one")
    for name, ids in params.named_ids().items():
        for t in ids:
            require(
                isinstance(t, int) and not isinstance(t, bool) and t >= 0,
                f"token ids in {name} must be integers of 0 or more, not {t!r}",
            )
    require(params.allowed_token_ids != (), "allowed_token_ids is empty: nothing could be drawn; name at least one id")
    for token, bias in (params.logit_bias or {}).items():
        require(
            isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100.0 <= bias <= 100.0,
            f"logit_bias of token {token} must be between -100 and 100, not {bias!r}",
        )


SEQUENCES = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "dry_breakers")
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "contrastive_beta",
    "contrastive_alpha",
    "penalty_alpha",
)
_OPTIONAL_FLOATS = frozenset({"contrastive_beta"})
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
_OPTIONAL_INTS = frozenset({"best_of", "max_tokens", "seed", "logprobs", "prompt_logprobs"})
_INTS = (
    "n",
    "best_of",
    "top_k",
    "no_repeat_ngram",
    "dry_allowed_length",
    "dry_range",
    "min_tokens",
    "max_tokens",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "priority",
)
