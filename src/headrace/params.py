"""What a caller may ask of one request: `SamplingParams`, checked when it is made."""

from typing import Self

import msgspec

from headrace.structured import ConstraintError, StructuredOutputs

__all__ = ["MAX_LOGPROBS", "MAX_N", "MAX_STOP", "ConstraintError", "ParamError", "SamplingParams", "StructuredOutputs"]

MAX_N = 64
MAX_LOGPROBS = 64
MAX_STOP = 64
DRY_LONGEST = 64  # tokens of a repetition that are counted
# The filters, each with the value that lets all tokens through.
FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "top_n_sigma": 0.0, "xtc_probability": 0.0}
MAX_CANDIDATES = 64  # nodes of a draft tree


class ParamError(ValueError):
    """A parameter no request can have; the message says which and what to change."""


def _as_tuple(name: str, value: object) -> object:
    """Lists become tuples, lists of lists too, and a single string a tuple of one."""
    if value is None and name == "allowed_token_ids":
        return None
    if isinstance(value, str):
        return (value,)
    _require(isinstance(value, (list, tuple)), f"{name} must be a list, not {value!r}")
    return tuple(tuple(v) if isinstance(v, list) else v for v in value)  # type: ignore[attr-defined]


def _constraint(value: object) -> StructuredOutputs:
    try:
        return StructuredOutputs.of(value)
    except ConstraintError as error:
        raise ParamError(str(error)) from None


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ParamError(message)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one request draws its tokens, when it stops, and what it reports. Every default is neutral.

    Logits are processed in the order of card B1: contrast with the amateur -> bias, bad words, min_tokens -> no-repeat-ngram
    -> repetition -> frequency and presence -> DRY -> temperature -> top-n-sigma -> top-k -> typical -> top-p -> min-p -> XTC
    or mirostat -> draw. `temperature` below 0.01 is greedy.
    Raises ParamError (a ValueError) when a value cannot be meant.
    """

    n: int = 1
    best_of: int | None = None  # draw so many, give the n whose tokens are likeliest on average; at the end, not streamed
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # only logits within so many standard deviations of the best; 0: off
    xtc_probability: float = 0.0  # how often the top choices are left out; 0: off
    xtc_threshold: float = 0.1  # the probability that makes a token a top choice
    mirostat_tau: float = 0.0  # mean surprise aimed at, in bits (mirostat 2); 0: off
    mirostat_eta: float = 0.1  # how fast it is steered there
    repetition_penalty: float = 1.0  # once per distinct token of prompt and output (CTRL, sign-aware)
    presence_penalty: float = 0.0  # once per distinct token of the output
    frequency_penalty: float = 0.0  # per occurrence in the output
    no_repeat_ngram: int = 0  # 0: off
    dry_multiplier: float = 0.0  # what going on with a repetition costs (DRY); 0: off
    dry_base: float = 1.75  # the cost grows by this with each token that already repeats
    dry_allowed_length: int = 2  # repetitions up to so many tokens are free
    dry_breakers: tuple[int, ...] = ()  # token ids that no repetition reaches across
    dry_range: int = 0  # how many of the last tokens are looked at; 0: all, the prompt included
    contrastive_beta: float | None = None  # contrastive decoding: how much the amateur counts; None: off
    contrastive_alpha: float = 0.1  # its mask: tokens with at least this share of the likeliest one's probability
    penalty_alpha: float = 0.0  # contrastive search over the top_k tokens: how much likeness costs; 0: off
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    allowed_token_ids: tuple[int, ...] | None = None
    structured_outputs: StructuredOutputs | None = None  # what the output must be: a JSON schema, a regex, …
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: up to the context limit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # None: off; k: the drawn token and the k best
    logprobs_mode: str = "raw"  # raw | processed
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0  # lower runs first

    def __post_init__(self) -> None:
        for name in _SEQUENCES:
            msgspec.structs.force_setattr(self, name, _as_tuple(name, getattr(self, name)))
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            msgspec.structs.force_setattr(self, "structured_outputs", _constraint(self.structured_outputs))
        self._check_types()
        self._check_ranges()

    def _check_types(self) -> None:
        for name in _FLOATS:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            _require(number or (name in _OPTIONAL_FLOATS and value is None), f"{name} must be a number, not {value!r}")
        for name in _FLAGS:
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be true or false, not {value!r}")
        for name in _INTS:
            value = getattr(self, name)
            optional = name in _OPTIONAL_INTS and value is None
            _require(
                optional or (isinstance(value, int) and not isinstance(value, bool)),
                f"{name} must be an integer{' or None' if name in _OPTIONAL_INTS else ''}, not {value!r}",
            )
            if name != "seed" and value is not None:
                _require(abs(value) < 2**31, f"{name} must be at most 2**31 - 1, not {value}")

    def _check_ranges(self) -> None:
        _require(1 <= self.n <= MAX_N, f"n must be between 1 and {MAX_N}, not {self.n}")
        _require(0.0 <= self.temperature <= 100.0, f"temperature must be between 0 and 100, not {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            _require(0.0 < value <= 1.0, f"{name} must be above 0 and at most 1, not {value}")
        _require(0.0 <= self.min_p <= 1.0, f"min_p must be between 0 and 1, not {self.min_p}")
        _require(
            0.01 <= self.repetition_penalty <= 10.0,
            f"repetition_penalty must be between 0.01 and 10 (1 is off), not {self.repetition_penalty}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2.0 <= value <= 2.0, f"{name} must be between -2 and 2, not {value}")
        self._check_samplers()
        _require(0 <= self.no_repeat_ngram <= 64, f"no_repeat_ngram must be between 0 and 64, not {self.no_repeat_ngram}")
        _require(self.min_tokens >= 0, f"min_tokens must be 0 or more, not {self.min_tokens}")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, f"max_tokens must be 1 or more, not {self.max_tokens}")
            _require(
                self.min_tokens <= self.max_tokens,
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        _require(
            self.best_of is None or self.n <= self.best_of <= MAX_N,
            f"best_of must be between n ({self.n}) and {MAX_N}, not {self.best_of}",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= MAX_LOGPROBS, f"{name} must be between 0 and {MAX_LOGPROBS}, not {value}")
        _require(
            self.logprobs_mode in ("raw", "processed"), f"logprobs_mode must be raw or processed, not {self.logprobs_mode!r}"
        )
        _require(self.seed is None or 0 <= self.seed < 2**64, f"seed must be between 0 and 2**64 - 1, not {self.seed}")
        self._check_contrast()
        self._check_lists()

    def _check_samplers(self) -> None:
        """DRY, XTC, top-n-sigma and mirostat."""
        _require(0.0 <= self.dry_multiplier <= 100.0, f"dry_multiplier must be between 0 and 100, not {self.dry_multiplier}")
        _require(1.0 <= self.dry_base <= 10.0, f"dry_base must be between 1 and 10, not {self.dry_base}")
        _require(
            1 <= self.dry_allowed_length <= DRY_LONGEST,
            f"dry_allowed_length must be between 1 and {DRY_LONGEST}, not {self.dry_allowed_length}",
        )
        _require(self.dry_range >= 0, f"dry_range must be 0 (all) or more, not {self.dry_range}")
        _require(0.0 <= self.top_n_sigma <= 100.0, f"top_n_sigma must be between 0 (off) and 100, not {self.top_n_sigma}")
        for name in ("xtc_probability", "xtc_threshold"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, f"{name} must be between 0 and 1, not {value}")
        _require(0.0 <= self.mirostat_tau <= 100.0, f"mirostat_tau must be between 0 (off) and 100, not {self.mirostat_tau}")
        _require(0.0 <= self.mirostat_eta <= 1.0, f"mirostat_eta must be between 0 and 1, not {self.mirostat_eta}")
        if self.mirostat_tau:
            _require(not self.greedy, "mirostat_tau steers a draw and needs a temperature of 0.01 or more")
            for name, neutral in FILTERS.items():
                _require(getattr(self, name) == neutral, f"mirostat_tau chooses the tokens itself; set {name} to {neutral}")

    def _check_contrast(self) -> None:
        beta = self.contrastive_beta
        _require(beta is None or 0.0 <= beta <= 10.0, f"contrastive_beta must be between 0 and 10, not {beta}")
        _require(
            0.0 <= self.contrastive_alpha <= 1.0, f"contrastive_alpha must be between 0 and 1, not {self.contrastive_alpha}"
        )
        _require(0.0 <= self.penalty_alpha < 1.0, f"penalty_alpha must be at least 0 and below 1, not {self.penalty_alpha}")
        if not self.penalty_alpha:
            return
        _require(
            2 <= self.top_k <= MAX_CANDIDATES,
            f"contrastive search needs top_k between 2 and {MAX_CANDIDATES} (its candidates), not {self.top_k}; try 4",
        )
        _require(self.n == 1, "contrastive search has one answer; set n to 1, or penalty_alpha to 0")
        given = [name for name, neutral in _NO_SEARCH.items() if getattr(self, name) not in neutral]
        _require(
            not given,
            f"contrastive search chooses by probability and likeness alone; leave out {', '.join(given)}, or penalty_alpha",
        )

    def _check_lists(self) -> None:
        _require(len(self.stop) <= MAX_STOP, f"at most {MAX_STOP} stop strings, not {len(self.stop)}")
        _require(all(isinstance(s, str) and s for s in self.stop), "stop strings must be non-empty text; remove the empty one")
        _require(
            self.logit_bias is None or isinstance(self.logit_bias, dict),
            f"logit_bias must map token ids to numbers, not {self.logit_bias!r}",
        )
        for word in self.bad_words:
            _require(isinstance(word, tuple), f"bad_words must be lists of token ids, not {word!r}")
            _require(bool(word), "a bad word needs at least one token; remove the empty one")
        for name, ids in self._ids().items():
            for t in ids:
                _require(
                    isinstance(t, int) and not isinstance(t, bool) and t >= 0,
                    f"token ids in {name} must be integers of 0 or more, not {t!r}",
                )
        _require(self.allowed_token_ids != (), "allowed_token_ids is empty: nothing could be drawn; name at least one id")
        for token, bias in (self.logit_bias or {}).items():
            _require(
                isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100.0 <= bias <= 100.0,
                f"logit_bias of token {token} must be between -100 and 100, not {bias!r}",
            )

    def _ids(self) -> dict[str, list[int]]:
        return {
            "stop_token_ids": list(self.stop_token_ids),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "dry_breakers": list(self.dry_breakers),
            "bad_words": [t for word in self.bad_words for t in word],
            "logit_bias": list(self.logit_bias or ()),
        }

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ParamError if a token id named here does not exist in a vocabulary of `vocab_size`."""
        for name, ids in self._ids().items():
            largest = max(ids, default=-1)
            _require(largest < vocab_size, f"{name} names token {largest}, but the model's ids end at {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """Whether the draw is an argmax: temperatures below 0.01 are (W12: T = 0 is a case of its own)."""
        return self.temperature < 0.01

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    @classmethod
    def precise(cls, **changes: object) -> Self:
        """Greedy: the same answer each time, for facts, extraction and code."""
        return cls(**{"temperature": 0.0, "max_tokens": None, **changes})  # type: ignore[arg-type]

    @classmethod
    def balanced(cls, **changes: object) -> Self:
        """A chat setting: some variety, little nonsense."""
        return cls(**{"temperature": 0.7, "top_p": 0.9, "max_tokens": None, **changes})  # type: ignore[arg-type]

    @classmethod
    def creative(cls, **changes: object) -> Self:
        """Stories and ideas: a flat draw, kept sane by min-p."""
        return cls(**{"temperature": 1.1, "min_p": 0.05, "max_tokens": None, **changes})  # type: ignore[arg-type]


_SEQUENCES = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "dry_breakers")
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
# What contrastive search does not look at, and the values that say nothing.
_NO_SEARCH: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_n_sigma": (0,),
    "xtc_probability": (0,),
    "mirostat_tau": (0,),
    "dry_multiplier": (0,),
    "best_of": (None, 1),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "no_repeat_ngram": (0,),
    "logit_bias": (None,),
    "bad_words": ((),),
    "allowed_token_ids": (None,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "contrastive_beta": (None,),
}
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
