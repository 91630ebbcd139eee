"""Checks of combinations of a request's parameters."""

from typing import Any

import msgspec

from headrace.data.fields import ParamError, Use, declared, ignored_fields

MAX_N = 64
# Contrastive search verifies its candidates as nodes of a draft tree.
MAX_CANDIDATES = 64
# Fields that a method reads, for methods that a field selects.
REFINE = frozenset({"refine"})
BEAMS = frozenset("beam temperature n min_tokens structured_outputs".split())
SPEECH_BEAMS = BEAMS - {"structured_outputs"} | {"timestamps", "logprobs_mode"}
SEARCH = frozenset("penalty_alpha top_k min_tokens".split())


def check_together(params: Any) -> None:
    """Raise ParamError for fields of SamplingParams that exclude each other."""
    check_refine(params)
    check_lengths(params)
    check_mirostat(params)
    check_contrast(params)
    check_exits(params)


def check_lengths(params: Any) -> None:
    """Check number and length of answers, and allowed tokens."""
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ParamError("min_tokens", f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})")
    if params.best_of is not None and not params.n <= params.best_of <= MAX_N:
        raise ParamError("best_of", f"best_of must be between n ({params.n}) and {MAX_N}, not {params.best_of}")
    if params.timestamps is not None and params.structured_outputs is not None:
        raise ParamError("timestamps", "timestamps and structured_outputs are two constraints of one answer; leave one out")
    if params.allowed_token_ids == ():
        raise ParamError("allowed_token_ids", "allowed_token_ids is empty: nothing could be drawn; name at least one id")


def check_refine(params: Any) -> None:
    """Check the fields next to `refine`, which samples nothing; limit `max_tokens` to its length."""
    if params.refine is None:
        return
    if given := ignored_fields(params, REFINE):
        raise ParamError(
            "refine_block", f"refine fills a block with its most probable tokens; leave out {', '.join(given)}, or refine"
        )
    length = params.refine.length
    if length is not None and (params.max_tokens is None or params.max_tokens > length):
        msgspec.structs.force_setattr(params, "max_tokens", length)


def check_mirostat(params: Any) -> None:
    """Check mirostat, which chooses the candidate tokens from the sampled ones."""
    if not params.mirostat_tau:
        return
    if params.verification != "noise":
        raise ParamError(
            "verification", "mirostat_tau needs the sampled tokens, which a draft does not have; set verification to noise"
        )
    if params.greedy:
        raise ParamError("mirostat_tau", "mirostat_tau needs sampling; set temperature to 0.01 or more")
    kind: type[msgspec.Struct] = type(params)
    for one in declared(kind):
        if Use.FILTER in one.field.use and getattr(params, one.name) != one.default:
            raise ParamError("mirostat_tau", f"mirostat_tau replaces {one.name}; set {one.name} to {one.default}")


def check_contrast(params: Any) -> None:
    """Check contrastive decoding, cascades with an amateur, and contrastive search."""
    if params.combined is not None and params.prompt_logprobs is not None:
        name = "contrastive_beta" if params.defer_rule is None else "defer_rule"
        raise ParamError(name, f"prompt_logprobs are one model's, and {name} combines two; leave {name} or prompt_logprobs out")
    if params.contrastive_beta is not None and params.defer_rule is not None:
        raise ParamError("contrastive_beta", "two uses of one amateur model; leave contrastive_beta or defer_rule out")
    if not params.penalty_alpha:
        return
    if not 2 <= params.top_k <= MAX_CANDIDATES:
        raise ParamError(
            "top_k",
            f"contrastive search needs top_k between 2 and {MAX_CANDIDATES} (its candidates), not {params.top_k}; try 4",
        )
    if params.n != 1:
        raise ParamError("n", "contrastive search has one answer; set n to 1, or penalty_alpha to 0")
    if given := ignored_fields(params, SEARCH):
        raise ParamError(
            given[0],
            f"contrastive search uses only probability and similarity; leave out {', '.join(given)}, or penalty_alpha",
        )


def check_exits(params: Any) -> None:
    """Check early exit, whose tokens come from different depths of the model, and cascades of two models."""
    if not params.leaves:
        return
    name = "exit_threshold" if params.cascade_threshold is None else "cascade_threshold"
    if params.exit_threshold is not None and params.cascade_threshold is not None:
        raise ParamError("exit_threshold", "two ways to skip the full model; leave exit_threshold or cascade_threshold out")
    if params.combined is not None:
        other = "contrastive_beta" if params.defer_rule is None else "defer_rule"
        raise ParamError(name, f"{other} needs the full model at every token; leave {name} or {other} out")
    if params.best_of is not None and params.best_of > 1:
        raise ParamError("best_of", f"best_of needs the full model at every token; leave {name} or best_of out")
    if params.prompt_logprobs is not None:
        raise ParamError(name, f"prompt_logprobs need the full model; leave {name} or prompt_logprobs out")
    if params.exit_threshold is not None and (mode := params.logprobs_mode) != "raw":
        raise ParamError(
            "logprobs_mode",
            f"{mode} log-probabilities need the full model; set logprobs_mode to raw, or leave exit_threshold out",
        )
    if params.exit_threshold is not None and params.exit_decay and params.max_tokens is None:
        raise ParamError("exit_decay", "exit_decay divides by max_tokens; set max_tokens, or leave exit_decay out")
