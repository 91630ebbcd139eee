"""SamplingParams from the fields of a request, within the limits of the server."""

from typing import Any

from headrace.data.explicit import params_of
from headrace.data.params import ParamError, SamplingParams
from headrace.server.access.principals import PRINCIPAL
from headrace.server.http.api_error import ApiError, bad
from headrace.server.http.errors import wrong_field
from headrace.server.protocols.fields import SAMPLING_FIELDS, Sampling, Unsupported
from headrace.server.settings import Limits

WIDTHS = ("n", "best_of", "beam_width")
DEFAULT_BEAMS = 4


def sampling_params(request: Sampling, own: dict[str, Any], limits: Limits, **more: Any) -> SamplingParams:
    """Parameters of a request. `more` overrides its fields, which override the model's `own` settings. Raises ApiError."""
    given = given_fields(request, limits)
    asked = {**given, **more}
    _check_limits(asked, limits)
    if asked.get("max_tokens") is None:
        asked["max_tokens"] = min(
            (most for most in (own.get("max_tokens"), limits.max_tokens) if most is not None), default=None
        )
    try:
        params = params_of(asked, own)
    except ParamError as error:
        raise bad(str(error), wrong_field(error, (*request.__struct_fields__, "logprobs"))) from None
    if request.stream and (params.beam or params.best_of):
        name = "beam_width" if params.beam else "best_of"
        raise bad(f"{name} and stream do not go together: which answer is the best is known at the end", "stream")
    return params


def given_fields(request: Sampling, limits: Limits) -> dict[str, Any]:
    """The sampling fields of a request as arguments of `params_of`. Raises ApiError."""
    given = {name: getattr(request, name) for name in SAMPLING_FIELDS if getattr(request, name) is not None}
    if request.top_k is not None:
        given["top_k"] = max(request.top_k, 0) if request.top_k >= -1 else request.top_k  # other servers switch it off with -1
    if request.seed is not None:
        if request.seed >= 2**64:
            raise bad(f"seed: must be an integer, at most {2**64 - 1}", "seed")
        given["seed"] = request.seed % 2**64  # the protocol's seeds are signed
    if request.logit_bias is not None:
        given["logit_bias"] = {_token_id(name): bias for name, bias in request.logit_bias.items()}
    if request.stop is not None:
        given["stop"] = _stop_strings(request.stop, limits)
    if request.return_exits and request.exit_threshold is None and request.cascade_threshold is None:
        raise bad("return_exits goes with exit_threshold or cascade_threshold", "return_exits")
    given |= _beam_fields(request)
    return given


def _beam_fields(request: Sampling) -> dict[str, Any]:
    """Fields for `use_beam_search`, as in vLLM: without a width, as many beams as answers, at least DEFAULT_BEAMS."""
    if request.use_beam_search is None:
        return {}
    if not request.use_beam_search:
        if request.beam_width is not None:
            raise bad("use_beam_search is false and beam_width is given; leave one of them out", "use_beam_search")
        return {}
    width = request.beam_width or request.best_of or max(DEFAULT_BEAMS, request.n or 1)
    return {"beam_width": width, "best_of": None}


def _check_limits(settings: dict[str, Any], limits: Limits) -> None:
    widths = [(name, limits.n) for name in WIDTHS]
    for name, most in (*widths, ("logprobs", limits.logprobs), ("max_tokens", limits.max_tokens)):
        value = settings.get(name)
        if value is not None and most is not None and value > most:
            raise bad(f"{name} must be {most} or less on this server, not {value}", name)
    if (priority := priority_of(settings.get("priority"), limits)) is not None:
        settings["priority"] = priority


def priority_of(given: int | None, limits: Limits) -> int | None:
    """The priority of a request; None for the default. Raises ApiError if it is below the limit of the key or the server."""
    own = PRINCIPAL.get().priority
    least = limits.priority if own is None else own
    if given is None:
        return own if own is not None and own > 0 else None
    if given < least:
        where = "on this server" if own is None else "with this key"
        raise bad(f"priority must be {least} or more {where}, not {given}", "priority")
    return given


def _stop_strings(stop: str | list[str], limits: Limits) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > limits.stop:
        raise bad(f"at most {limits.stop} stop strings, not {len(stops)}", "stop")
    if any(len(one) > limits.stop_chars for one in stops):
        raise bad(f"a stop string may have {limits.stop_chars} characters; shorten it", "stop")
    return stops


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 10):
        raise bad(f'the keys of logit_bias are token ids, as in {{"42": -5}}, not {name[:40]!r}', "logit_bias")
    return int(name)


def check_stream_options(request: Sampling) -> None:
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options goes with stream: true", "stream_options")


def check_top_logprobs(value: int | None) -> None:
    if value is not None and value < 0:
        raise bad(f"top_logprobs must be 0 or more, not {value}", "top_logprobs")


def refuse_unsupported(body: Any, table: Unsupported) -> None:
    """Raises ApiError for the first field of the table that has an effect in `body`."""
    for name, (without_effect, why) in table.items():
        if getattr(body, name) not in without_effect:
            raise ApiError(400, f"{name}: {why}; leave the field out", param=name, code="unsupported")
