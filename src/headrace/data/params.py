"""What a caller may ask of one request: `SamplingParams` and `BeamSearchParams`, checked when they are made."""

from collections.abc import Mapping
from typing import Any, Literal, Self

import msgspec

from headrace.data.param_checks import (
    BEAMS,
    DRY_LONGEST,
    FILTERS,
    MAX_CANDIDATES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    SEQUENCES,
    ParamError,
    as_tuple,
    check_ranges,
    check_types,
    require,
    unheeded,
)
from headrace.data.structured import ConstraintError, StructuredOutputs

__all__ = [
    "DRY_LONGEST",
    "FILTERS",
    "MAX_CANDIDATES",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_STOP",
    "BeamSearchParams",
    "ConstraintError",
    "ParamError",
    "SamplingParams",
    "StructuredOutputs",
    "params_of",
]

PRESETS: dict[str, dict[str, Any]] = {
    "precise": {"temperature": 0.0, "max_tokens": None},
    "balanced": {"temperature": 0.7, "top_p": 0.9, "max_tokens": None},
    "creative": {"temperature": 1.1, "min_p": 0.05, "max_tokens": None},
}


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How beams are kept, ended and ranked. Raises ParamError (a ValueError) for what cannot be meant.

    Finished hypotheses rank by score / length ** length_penalty ("hf", as transformers does) or by
    score / ((5 + length) / 6) ** length_penalty ("gnmt", Wu et al. 2016); length counts generated tokens, the end token
    included. Above 0 the penalty favours long answers, below 0 short ones, since scores are negative (W46).
    `early_stopping`: True ends with `beam_width` finished hypotheses; False when no live one can win at its present length;
    "never" when none can win at any length it may still reach, which is exact.
    `groups` > 1 is diverse beam search (Vijayakumar et al. 2018): each group pays `diversity_penalty` for each time an earlier
    group has taken the same token at the same step. GNMT's coverage penalty is refused: it needs attention weights.
    """

    beam_width: int = 4
    n: int = 1
    max_tokens: int = 64
    length_penalty: float = 1.0
    length_rule: Literal["hf", "gnmt"] = "hf"
    early_stopping: bool | Literal["never"] = False
    groups: int = 1
    diversity_penalty: float = 0.0
    coverage_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None  # what every hypothesis must be
    skip_special_tokens: bool = True
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            msgspec.structs.force_setattr(self, "structured_outputs", _constraint(self.structured_outputs))
        for name in ("stop", "stop_token_ids"):
            msgspec.structs.force_setattr(self, name, as_tuple(name, getattr(self, name)))
        for name in ("beam_width", "n", "groups", "max_tokens"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole, f"{name} must be an integer, not {value!r}")
        for name in ("length_penalty", "diversity_penalty"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(number, f"{name} must be a number, not {value!r}")
        require(1 <= self.beam_width <= MAX_N, f"beam_width must be between 1 and {MAX_N}, not {self.beam_width}")
        require(1 <= self.n <= self.beam_width, f"n must be between 1 and beam_width ({self.beam_width}), not {self.n}")
        divides = self.groups >= 1 and self.beam_width % self.groups == 0
        require(divides, f"groups ({self.groups}) must divide beam_width ({self.beam_width})")
        cost = self.diversity_penalty
        require(0.0 <= cost <= 100.0, f"diversity_penalty must be between 0 and 100, not {cost}")
        require(not cost or self.groups > 1, "diversity_penalty needs groups above 1; one group has nobody to differ from")
        require(-10.0 <= self.length_penalty <= 10.0, f"length_penalty must be between -10 and 10, not {self.length_penalty}")
        require(self.length_rule in ("hf", "gnmt"), f"length_rule must be hf or gnmt, not {self.length_rule!r}")
        early = self.early_stopping is True or self.early_stopping is False or self.early_stopping == "never"
        require(early, f"early_stopping must be true, false or 'never', not {self.early_stopping!r}")
        require(self.coverage_penalty == 0, "coverage_penalty needs attention weights, which are never formed; set it to 0")

    def sampling(self) -> "SamplingParams":
        """The parameters of a request that is decoded so."""
        return SamplingParams(beam=self, **self.shared())

    def shared(self) -> dict[str, Any]:
        """What any request has, by the names of SamplingParams."""
        names = set(self.__struct_fields__) & set(SamplingParams.__struct_fields__)
        return {"temperature": 0.0, **{name: getattr(self, name) for name in names}}

    def normalised(self, score: float, length: int) -> float:
        """The rank of a hypothesis of `length` generated tokens."""
        base = float(length) if self.length_rule == "hf" else (5 + length) / 6
        return float(score / base**self.length_penalty)


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
    min_tokens: int = 0  # these first tokens hold no end token, and no stop string in them ends the output
    max_tokens: int | None = 16  # None: up to the context limit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None  # None: off; k: the drawn token and the k best
    logprobs_mode: str = "raw"  # raw | processed
    prompt_logprobs: int | None = None
    verification: str = "noise"  # of drafts: noise | rejection | block; the last two give other samples than plain decoding
    skip_special_tokens: bool = True
    priority: int = 0  # lower runs first
    beam: BeamSearchParams | None = None  # beam search in place of drawing; `BeamSearchParams.sampling` sets the rest to fit

    def __post_init__(self) -> None:
        for name in SEQUENCES:
            msgspec.structs.force_setattr(self, name, as_tuple(name, getattr(self, name)))
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            msgspec.structs.force_setattr(self, "structured_outputs", _constraint(self.structured_outputs))
        check_types(self)
        check_ranges(self)
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_beam(self, beam: BeamSearchParams) -> None:
        """Nothing may be asked for that beam search would drop."""
        given = [name for name, wanted in beam.shared().items() if getattr(self, name) != wanted] + unheeded(self, BEAMS)
        for name in given:
            raise ParamError(
                f"{name} does not go with beam search, which ranks by the model's own log-probabilities; leave it out"
            )

    def named_ids(self) -> dict[str, list[int]]:
        """The token ids of each field that names some."""
        return {
            "stop_token_ids": list(self.stop_token_ids),
            "allowed_token_ids": list(self.allowed_token_ids or ()),
            "dry_breakers": list(self.dry_breakers),
            "bad_words": [t for word in self.bad_words for t in word],
            "logit_bias": list(self.logit_bias or ()),
        }

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ParamError if a token id named here does not exist in a vocabulary of `vocab_size`."""
        for name, ids in self.named_ids().items():
            largest = max(ids, default=-1)
            require(largest < vocab_size, f"{name} names token {largest}, but the model's ids end at {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """Whether the draw is an argmax: temperatures below 0.01 are (W12: T = 0 is a case of its own)."""
        return self.temperature < 0.01

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection; at temperature 0 both rules are the same comparison."""
        return self.verification != "noise" and not self.greedy

    @property
    def widest(self) -> int:
        """The most outputs it grows at once."""
        return max(self.n, self.best_of or 0, self.beam.beam_width if self.beam else 0)

    def replace(self, **changes: object) -> Self:
        """A copy with some fields changed, checked again."""
        return msgspec.structs.replace(self, **changes)

    @classmethod
    def precise(cls, **changes: object) -> Self:
        """Greedy: the same answer each time, for facts, extraction and code."""
        return cls(**{**PRESETS["precise"], **changes})

    @classmethod
    def balanced(cls, **changes: object) -> Self:
        """A chat setting: some variety, little nonsense."""
        return cls(**{**PRESETS["balanced"], **changes})

    @classmethod
    def creative(cls, **changes: object) -> Self:
        """Stories and ideas: a flat draw, kept sane by min-p."""
        return cls(**{**PRESETS["creative"], **changes})


def _constraint(value: object) -> StructuredOutputs:
    try:
        return StructuredOutputs.of(value)
    except ConstraintError as error:
        raise ParamError(str(error)) from None


def params_of(given: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> SamplingParams:
    """Parameters from flat fields, as requests and command lines have them; `own`: the model's, where nothing is given.

    With `beam_width` it is beam search, to which what the model's own settings say about drawing does not apply; the fields of
    BeamSearchParams go without their class (`beam_groups` is `groups`). Raises ParamError.
    """
    fields = {BEAM_NAMES.get(name, name): value for name, value in given.items()}
    width = fields.get("beam_width")
    if width is None:
        for name in BEAM_FIELDS:
            require(fields.pop(name, None) is None, f"{name} goes with beam_width; give that too, or leave it out")
        fields.pop("beam_width", None)
        own = dict(own or {})
        if fields.get("mirostat_tau"):
            own = {name: value for name, value in own.items() if name not in FILTERS}  # it chooses the tokens itself
        return SamplingParams(**{**own, **fields})
    names = set(BeamSearchParams.__struct_fields__)
    beam = {name: value for name, value in fields.items() if name in names and not (name == "max_tokens" and value is None)}
    rest = {name: value for name, value in fields.items() if name not in names}
    made = BeamSearchParams(**beam)
    return SamplingParams(beam=made, **{**made.shared(), **rest})


BEAM_FIELDS = ("length_penalty", "length_rule", "early_stopping", "groups", "diversity_penalty", "coverage_penalty")
BEAM_NAMES = {"beam_groups": "groups"}
