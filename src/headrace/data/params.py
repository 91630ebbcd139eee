"""Parameters of one request: `SamplingParams` and `BeamSearchParams`. They are checked when they are created."""

import math
from typing import Annotated, Any, Literal, Self

import msgspec

from headrace.data.fields import Field, ParamError, Params, Use, check, declared, fields_with_use, ignored_fields, token_ids
from headrace.data.pairing import BEAMS, MAX_N, SPEECH_BEAMS, check_together
from headrace.data.structured import ConstraintError, StructuredOutputs

__all__ = [
    "BeamSearchParams",
    "ConstraintError",
    "ParamError",
    "RefineParams",
    "SamplingParams",
    "StructuredOutputs",
    "TimestampParams",
]

MAX_LOGPROBS = 64
MAX_STOP = 64
# top_p 0 becomes this: the nucleus is the most probable token.
SMALLEST_NUCLEUS = 1e-9
# Longest repetition that DRY counts, in tokens.
DRY_LONGEST = 64
# A threshold that no confidence reaches.
MOST_SURE = 1.01
LOOP, DRAW, CORE, SAMPLER, FILTER, DETAIL = Use.LOOP, Use.DRAW, Use.CORE, Use.SAMPLER, Use.FILTER, Use.DETAIL
OFF = (0, "off")
# Most token ids in a field. `allowed_token_ids` may list almost a whole vocabulary.
IDS = 16_384
PRESETS: dict[str, dict[str, Any]] = {
    "precise": {"temperature": 0.0, "max_tokens": None},
    "balanced": {"temperature": 0.7, "top_p": 0.9, "max_tokens": None},
    "creative": {"temperature": 1.1, "min_p": 0.05, "max_tokens": None},
}

# A block is verified as a draft of this many nodes.
MAX_BLOCK = 64


class RefineParams(
    msgspec.Struct, metaclass=Params, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """How blocks are filled in. Raises ParamError for invalid values.

    After pass t of T over a block of K tokens, the K (T - t) / T tokens with the lowest confidence (rounded down) are masked
    again. remask: "any" chooses among all tokens (Mask-Predict, Ghazvininejad et al. 2019), "masked" among those that were
    masked in the last pass. One pass is fully non-autoregressive (Gu et al. 2018). length: largest number of tokens of the
    answer; the last block is shortened to it.
    """

    block: Annotated[
        int, Field("Block filling: tokens of a block (models with a mask token)", ge=1, le=MAX_BLOCK, name="refine_block")
    ] = 8
    passes: Annotated[
        int, Field("Block filling: passes over a block, at most its number of tokens", ge=1, le=MAX_BLOCK, name="refine_passes")
    ] = 4
    remask: Annotated[
        Literal["any", "masked"],
        Field("Block filling: tokens that a pass masks again: any of the block, or only masked ones", name="refine_remask"),
    ] = "any"
    length: Annotated[
        int | None,
        Field("Block filling: tokens of the answer, if known; the last block is then shorter", ge=1, name="refine_length"),
    ] = None

    def __post_init__(self) -> None:
        check(self)


class TimestampParams(
    msgspec.Struct, metaclass=Params, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """Rules of Whisper's timestamps, as token ids (`headrace.decoding.timestamps`).

    first: of the timestamp 0.00; all later ids are timestamps. end: of the end token, above all text tokens. suppressed: never
    sampled. blank: not sampled first. latest: largest first timestamp, in steps of 0.02 s; None: any.
    """

    first: int
    end: int
    suppressed: tuple[int, ...] = ()
    blank: tuple[int, ...] = ()
    latest: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """All token ids that are named here."""
        return (self.first, self.end, *self.suppressed, *self.blank)


class BeamSearchParams(
    msgspec.Struct, metaclass=Params, frozen=True, kw_only=True, repr_omit_defaults=True, forbid_unknown_fields=True
):
    """Parameters of beam search. Raises ParamError (a ValueError) for invalid values.

    Finished hypotheses rank by score / length ** length_penalty ("hf", as transformers does) or by
    score / ((5 + length) / 6) ** length_penalty ("gnmt", Wu et al. 2016); length counts generated tokens, the end token
    included. Above 0 the penalty favours long answers, below 0 short ones, since scores are negative.
    early_stopping: True stops at `beam_width` finished hypotheses; False if no running one can win at its current length;
    "never" if none can win at any length, which is exact.
    groups > 1: diverse beam search (Vijayakumar et al. 2018), a group's score falls by `diversity_penalty` for each earlier
    group with the same token in the same step. GNMT's coverage penalty is not supported, as it needs attention weights.
    """

    beam_width: Annotated[int, Field("Beam search: number of beams", ge=1, le=MAX_N, option="--beams")] = 4
    n: int = 1
    max_tokens: int = 64
    length_penalty: Annotated[
        float, Field("Above 0: favours longer answers (1: ranks by mean log-probability)", ge=-10, le=10)
    ] = 1.0
    length_rule: Annotated[
        Literal["hf", "gnmt"],
        Field("Divisor of a beam's score: hf (length ** penalty) or gnmt (((5 + length) / 6) ** penalty)"),
    ] = "hf"
    early_stopping: Annotated[
        bool | Literal["never"], Field("When beam search stops: true (beam_width answers have ended), false, or never (exact)")
    ] = False
    groups: Annotated[int, Field("Diverse beam search: number of groups", name="beam_groups")] = 1
    diversity_penalty: Annotated[
        float, Field("Diverse beam search: penalty for a token that an earlier group chose", ge=0, le=100)
    ] = 0.0
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
        check(self)
        if not 1 <= self.n <= self.beam_width:
            raise ParamError("n", f"n must be between 1 and beam_width ({self.beam_width}), not {self.n}")
        if self.groups < 1 or self.beam_width % self.groups:
            raise ParamError("beam_groups", f"groups ({self.groups}) must divide beam_width ({self.beam_width})")
        if self.diversity_penalty and self.groups == 1:
            raise ParamError("diversity_penalty", "diversity_penalty needs groups above 1")
        if not (self.early_stopping is True or self.early_stopping is False or self.early_stopping == "never"):
            raise ParamError("early_stopping", f"early_stopping must be true, false or 'never', not {self.early_stopping!r}")
        if self.coverage_penalty != 0:
            raise ParamError(
                "coverage_penalty", "coverage_penalty needs attention weights, which are never formed; set it to 0"
            )

    def sampling(self) -> "SamplingParams":
        """The parameters of a request that is decoded so."""
        return SamplingParams(beam=self, **self.shared())

    def shared(self) -> dict[str, Any]:
        """The fields that SamplingParams has, too, by name."""
        names = set(self.__struct_fields__) & set(SamplingParams.__struct_fields__)
        return {"temperature": 0.0, **{name: getattr(self, name) for name in names}}

    def normalised(self, score: float, length: int) -> float:
        """The rank of a hypothesis of `length` generated tokens."""
        base = float(length) if self.length_rule == "hf" else (5 + length) / 6
        return float(score / base**self.length_penalty)


class SamplingParams(
    msgspec.Struct,
    metaclass=Params,
    frozen=True,
    kw_only=True,
    omit_defaults=True,
    repr_omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Parameters of a request: sampling, stop conditions, and reports. Every default is neutral.

    Logits are processed in this order: contrast or cascade with the amateur -> bias, bad words, min_tokens -> no-repeat-ngram
    -> repetition -> frequency and presence -> DRY -> timestamps -> temperature -> top-n-sigma -> top-k -> typical -> top-p
    -> min-p -> XTC or mirostat -> draw. `temperature` below 0.01 is greedy.
    Raises ParamError (a ValueError) for invalid values.
    """

    n: Annotated[int, Field("Number of answers", ge=1, le=MAX_N, option=None)] = 1
    best_of: Annotated[
        int | None, Field("Sample this many answers, return the n with the highest mean log-probability", neutral=(1,))
    ] = None
    temperature: Annotated[
        float,
        Field(
            "0: always the most probable token; higher: more varied answers", SAMPLER, ge=0, le=100, neutral=(0,), option="-t"
        ),
    ] = 1.0
    top_k: Annotated[int, Field("Keep the K most probable tokens", FILTER, ge=0, means=OFF)] = 0
    top_p: Annotated[
        float,
        Field("Keep the most probable tokens up to this total probability; 0: only the most probable one", FILTER, ge=0, le=1),
    ] = 1.0
    min_p: Annotated[float, Field("Keep tokens with at least this share of the highest probability", FILTER, ge=0, le=1)] = 0.0
    typical_p: Annotated[
        float,
        Field(
            "Keep the tokens closest to the expected surprise, up to this total probability",
            FILTER,
            gt=0,
            le=1,
            option="--typical",
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float, Field("Keep logits within this many standard deviations of the largest", FILTER, ge=0, le=100, means=OFF)
    ] = 0.0
    xtc_probability: Annotated[
        float, Field("XTC: probability of removing the top choices but the last", FILTER, ge=0, le=1, means=OFF)
    ] = 0.0
    xtc_threshold: Annotated[float, Field("XTC: least probability of a top choice", SAMPLER | DETAIL, ge=0, le=1)] = 0.1
    mirostat_tau: Annotated[float, Field("Mirostat 2: target surprise in bits", CORE, ge=0, le=100, means=OFF)] = 0.0
    mirostat_eta: Annotated[float, Field("Mirostat 2: learning rate", CORE | DETAIL, ge=0, le=1)] = 0.1
    repetition_penalty: Annotated[
        float, Field("Above 1: makes tokens that the text contains less probable", SAMPLER, ge=0.01, le=10, means=(1, "off"))
    ] = 1.0  # once per distinct token of prompt and output (CTRL, sign-aware)
    presence_penalty: Annotated[
        float, Field("Subtracted from the logit of each token that the answer contains", SAMPLER, ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Field("Subtracted for each occurrence of a token in the answer", SAMPLER, ge=-2, le=2)
    ] = 0.0
    no_repeat_ngram: Annotated[int, Field("No sequence of N tokens occurs twice", SAMPLER, ge=0, le=64, means=OFF)] = 0
    dry_multiplier: Annotated[
        float, Field("DRY: strength of the penalty for continuing a repetition", SAMPLER, ge=0, le=100, means=OFF)
    ] = 0.0
    dry_base: Annotated[float, Field("DRY: growth of the penalty per repeated token", SAMPLER | DETAIL, ge=1, le=10)] = 1.75
    dry_allowed_length: Annotated[
        int, Field("DRY: longest repetition without a penalty, in tokens", SAMPLER | DETAIL, ge=1, le=DRY_LONGEST)
    ] = 2
    dry_breakers: Annotated[tuple[int, ...], Field("DRY: token ids that end a repetition", DRAW | DETAIL, most=IDS)] = ()
    dry_range: Annotated[
        int, Field("DRY: number of last tokens that are searched", SAMPLER | DETAIL, ge=0, means=(0, "all"))
    ] = 0
    contrastive_beta: Annotated[
        float | None,
        Field(
            "Contrastive decoding: weight of the amateur model's logits, which are subtracted (usual: 0.5)", DRAW, ge=0, le=10
        ),
    ] = None
    contrastive_alpha: Annotated[
        float,
        Field(
            "Contrastive decoding: keep tokens with at least this share of the highest probability", DRAW | DETAIL, ge=0, le=1
        ),
    ] = 0.1
    defer_rule: Annotated[
        Literal["chow", "opt"] | None,
        Field(
            "Speculative cascade: accept the amateur model's token by its confidence (chow) or compared with the model (opt)",
            DRAW,
        ),
    ] = None
    defer_at: Annotated[
        float,
        Field("Speculative cascade: tolerance of the rule, from -1 (never accept) to 1 (always)", DRAW | DETAIL, ge=-1, le=1),
    ] = 0.3
    exit_threshold: Annotated[
        float | None,
        Field("Early exit at the first exit with at least this confidence (0 to 1; above 1: never)", ge=0, le=MOST_SURE),
    ] = None
    exit_criterion: Annotated[
        Literal["max_prob", "margin", "saturation", "classifier"],
        Field(
            "Confidence of an exit: highest probability, its margin, saturation of the hidden state, or a classifier", DETAIL
        ),
    ] = "max_prob"
    exit_decay: Annotated[float, Field("Above 0: the exit threshold falls along the answer", DETAIL, ge=0, le=100)] = 0.0
    exit_slope: Annotated[
        float,
        Field(
            "Above 0: earlier exits need more confidence, 1 - (1 - threshold) * (layers / layers of the last exit) ** slope",
            DETAIL,
            ge=0,
            le=100,
        ),
    ] = 0.0
    exit_audit: Annotated[bool, Field("Run the full model for every token, too, and report the tokens of both", DETAIL)] = False
    cascade_threshold: Annotated[
        float | None,
        Field(
            "Cascade by token: accept the smaller model's token at this confidence (0 to 1; above 1: never)", ge=0, le=MOST_SURE
        ),
    ] = None
    cascade_criterion: Annotated[
        Literal["max_prob", "margin"], Field("Confidence of the smaller model: highest probability, or its margin", DETAIL)
    ] = "max_prob"
    cascade_audit: Annotated[bool, Field("Run both models for every token, and report the tokens of both", DETAIL)] = False
    penalty_alpha: Annotated[
        float,
        Field("Contrastive search over the top_k tokens: weight of the similarity penalty (usual: 0.6, top_k 4)", ge=0, lt=1),
    ] = 0.0
    logit_bias: Annotated[
        dict[int, float] | None, Field("Added to the logits of these tokens", DRAW, ge=-100, le=100, most=IDS)
    ] = None
    bad_words: Annotated[tuple[tuple[int, ...], ...], Field("Excluded token sequences", DRAW, most=1024, each=64)] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, Field("Allow only these tokens", DRAW, most=262_144)] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Field("Form of the answer: a JSON schema, a regular expression, …", DRAW, http=False)
    ] = None
    timestamps: Annotated[TimestampParams | None, Field("Rules of Whisper's timestamps", DRAW, http=False, option=None)] = None
    min_tokens: Annotated[int, Field("Fewest tokens of the answer", SAMPLER, ge=0)] = 0
    max_tokens: Annotated[
        int | None,
        Field("Most tokens of the answer (default on the command line: the rest of the context)", LOOP, ge=1, option="-m"),
    ] = 16
    stop: Annotated[tuple[str, ...], Field("Text that ends the answer", LOOP, most=MAX_STOP)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Field("Tokens that end the answer", LOOP, most=IDS)] = ()
    include_stop_str_in_output: Annotated[bool, Field("Keep the stop string in the answer", LOOP, option=None)] = False
    ignore_eos: Annotated[bool, Field("Ignore the model's end token", LOOP)] = False
    seed: Annotated[int | None, Field("The same seed gives the same answer", LOOP, ge=0, le=2**64 - 1)] = None
    logprobs: Annotated[
        int | None,
        Field(
            "Log-probability of the sampled token and of the K most probable ones",
            ge=0,
            le=MAX_LOGPROBS,
            http=False,
            option=None,
        ),
    ] = None
    logprobs_mode: Annotated[
        Literal["raw", "masked", "processed"],
        Field(
            "Log-probabilities of the model (raw), after masks and penalties (masked), or also after temperature and filters "
            "(processed)",
            DETAIL,
            option=None,
        ),
    ] = "raw"
    prompt_logprobs: Annotated[
        int | None, Field("Log-probabilities of the prompt's tokens", ge=0, le=MAX_LOGPROBS, http=False, option=None)
    ] = None
    prompt_logprobs_start: Annotated[
        int,
        Field(
            "First prompt token with log-probabilities; earlier ones may come from the prefix cache",
            DETAIL,
            ge=0,
            http=False,
            option=None,
        ),
    ] = 0
    verification: Annotated[
        Literal["noise", "rejection", "block"],
        Field("Verification of drafts: noise (same output), rejection or block (same distribution)"),
    ] = "noise"
    skip_special_tokens: Annotated[bool, Field("Omit special tokens from the text", LOOP, option=None)] = True
    priority: Annotated[int, Field("Requests with a lower number run first", LOOP, option=None)] = 0
    adapter: Annotated[
        str | None,
        Field("Name of the adapter (LoRA) to use, one that the model was opened with", LOOP, http=False, option=None),
    ] = None
    beam: Annotated[
        BeamSearchParams | None,
        Field("Beam search instead of sampling; `BeamSearchParams.sampling` sets the other fields", http=False, option=None),
    ] = None
    refine: Annotated[RefineParams | None, Field("Block filling instead of sampling", http=False, option=None)] = None

    def __post_init__(self) -> None:
        check(self)
        check_together(self)
        if self.top_p == 0:
            msgspec.structs.force_setattr(self, "top_p", SMALLEST_NUCLEUS)
        if self.beam is not None:
            self._check_beam(self.beam)

    def _check_beam(self, beam: BeamSearchParams) -> None:
        """Nothing may be asked for that beam search would drop."""
        given = [name for name, wanted in beam.shared().items() if getattr(self, name) != wanted] + ignored_fields(
            self, BEAMS if self.timestamps is None else SPEECH_BEAMS
        )
        for name in given:
            raise ParamError(
                name, f"{name} does not go with beam search, which ranks by the model's own log-probabilities; leave it out"
            )

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ParamError if a token id named here does not exist in a vocabulary of `vocab_size`."""
        timestamps = () if self.timestamps is None else (("timestamps", self.timestamps.ids),)
        for name, ids in (*token_ids(self), *timestamps):
            largest = max(ids, default=-1)
            if largest >= vocab_size:
                raise ParamError(name, f"{name} names token {largest}, but the model's ids end at {vocab_size - 1}")

    @property
    def greedy(self) -> bool:
        """Whether sampling is an argmax. Temperatures below 0.01 count as 0."""
        return self.temperature < 0.01

    @property
    def constrained(self) -> bool:
        """Whether tokens are sampled under the masks of a constraint."""
        return self.structured_outputs is not None or self.timestamps is not None

    @property
    def combined(self) -> tuple[str, float, float] | None:
        """The rule that combines logits with an amateur model's and its two numbers; None without an amateur."""
        if self.contrastive_beta is not None:
            return "contrast", self.contrastive_alpha, self.contrastive_beta
        return None if self.defer_rule is None else (self.defer_rule, self.defer_at, 0.0)

    @property
    def leaves(self) -> bool:
        """Whether a token may come from an early exit or from the smaller model of a cascade."""
        return self.exit_threshold is not None or self.cascade_threshold is not None

    @property
    def sure_by(self) -> str:
        """The confidence criterion of the exit or smaller model."""
        return self.exit_criterion if self.cascade_threshold is None else self.cascade_criterion

    @property
    def audited(self) -> bool:
        """Whether both the exit (or smaller model) and the full model run, and their tokens are reported."""
        return self.exit_audit if self.cascade_threshold is None else self.cascade_audit

    def sure_at(self, written: int, share: float = 1.0) -> float:
        """Confidence threshold for the token after `written` tokens of the output (CALM, Schuster et al. 2022).

        share: layers below the exit, as a share of those below the last exit.
        """
        if self.cascade_threshold is not None:
            return self.cascade_threshold
        least = MOST_SURE if self.exit_threshold is None else self.exit_threshold
        if self.exit_slope and least <= 1:
            least = 1 - (1 - least) * share**self.exit_slope
        if not self.exit_decay or least > 1 or self.max_tokens is None:
            return least
        return min(1.0, 0.9 * least + 0.1 * math.exp(-self.exit_decay * written / self.max_tokens))

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection sampling. At temperature 0 that equals verification by noise."""
        return self.verification != "noise" and not self.greedy

    @property
    def widest(self) -> int:
        """Largest number of outputs at once."""
        return max(self.n, self.best_of or 0, self.beam.beam_width if self.beam else 0)

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain JSON data; `SamplingParams(**…)` makes the same again."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

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


# What beam search adds to the flat fields of a request, and their names there where these are others.
BEAM_FIELDS = [
    name for name in BeamSearchParams.__struct_fields__ if name not in ("beam_width", *SamplingParams.__struct_fields__)
]
BEAM_NAMES = {one.flat: one.name for one in declared(BeamSearchParams) if one.flat != one.name}
FLAT_NAMES = {name: flat for flat, name in BEAM_NAMES.items()}
COMMON = frozenset(fields_with_use(SamplingParams, LOOP))  # heeded whatever the strategy
DRAWN = frozenset(fields_with_use(SamplingParams, DRAW))  # by every `Sample` want
FILTERS = {one.name: one.default for one in declared(SamplingParams) if FILTER in one.field.use}
REFINE_NAMES = {one.flat: one.name for one in declared(RefineParams)}
