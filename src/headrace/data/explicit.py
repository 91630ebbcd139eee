"""Arguments of `LLM` in a normal form: one or many prompts, one set of parameters or one per prompt."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import index
from typing import Any

import msgspec

from headrace.data.fields import plain_value
from headrace.data.params import (
    BEAM_FIELDS,
    BEAM_NAMES,
    COMMON,
    FILTERS,
    FLAT_NAMES,
    REFINE_NAMES,
    BeamSearchParams,
    ParamError,
    RefineParams,
    SamplingParams,
)
from headrace.data.spelling import did_you_mean

PlainPrompt = str | list[int]
Prompt = str | Sequence[int] | Mapping[str, Any]
Params = SamplingParams | BeamSearchParams
Messages = Sequence[Mapping[str, Any]]
# Names of flat fields.
SETTINGS = frozenset({*SamplingParams.__struct_fields__, "beam_width", *BEAM_FIELDS, *BEAM_NAMES, *REFINE_NAMES})
# Keywords of `LLM.chat` besides these.
CHAT = (
    *("messages", "params", "sampling_params", "tools", "tool_choice", "parallel_tool_calls"),
    *("continue_final_message", "chat_template", "chat_template_kwargs", "parse_special"),
)

# Keywords of `LLM.render` that are no variables of the template.
RENDER = ("continue_final_message", "add_generation_prompt", "chat_template", "chat_template_kwargs", "parse_special")
NEUTRAL = SamplingParams()
# Fields that have no effect without another one.
GOES_WITH = {
    "exit_criterion": "exit_threshold",
    "exit_decay": "exit_threshold",
    "exit_slope": "exit_threshold",
    "exit_audit": "exit_threshold",
    "cascade_criterion": "cascade_threshold",
    "cascade_audit": "cascade_threshold",
    "defer_at": "defer_rule",
}


def applicable_settings(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The model's own settings that apply next to the `given` ones. Some methods choose tokens without sampling settings."""
    if any(given.get(name) is not None for name in ("beam_width", "refine_block", "refine")) or given.get("penalty_alpha"):
        return {name: value for name, value in own.items() if name in COMMON}
    if given.get("mirostat_tau"):
        return {name: value for name, value in own.items() if name not in FILTERS}
    return dict(own)


def params_of(given: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> SamplingParams:
    """Make parameters from the flat fields of requests and command lines. own: the model's settings, for fields not given.

    `beam_width` selects beam search, `refine_block` refine. Their fields have flat names, too (`beam_groups`, `refine_passes`).
    The model's sampling settings do not apply to these, nor to contrastive search. Raises ParamError.
    """
    fields = {BEAM_NAMES.get(name, name): value for name, value in given.items() if name not in REFINE_NAMES}
    refine = {REFINE_NAMES[name]: value for name, value in given.items() if name in REFINE_NAMES and value is not None}
    if refine and "block" not in refine:
        name = f"refine_{next(iter(refine))}"
        raise ParamError(name, f"{name} goes with refine_block; give that too, or leave it out")
    if refine:
        try:
            fields["refine"] = RefineParams(**refine)
        except ParamError as error:
            raise ParamError(error.field, f"refine_{error}") from None
    width = fields.get("beam_width")
    if width is None:
        for name in BEAM_FIELDS:
            if fields.pop(name, None) is not None:
                raise ParamError(FLAT_NAMES.get(name, name), f"{name} goes with beam_width; give that too, or leave it out")
        fields.pop("beam_width", None)
        made = SamplingParams(**{**applicable_settings(own or {}, fields), **fields})
        _check_alone(made)
        return made
    names = set(BeamSearchParams.__struct_fields__)
    beam = {name: value for name, value in fields.items() if name in names and not (name == "max_tokens" and value is None)}
    rest = {name: value for name, value in fields.items() if name not in names}
    search = BeamSearchParams(**beam)
    made = SamplingParams(beam=search, **{**search.shared(), **rest})
    _check_alone(made)
    return made


def _check_alone(params: SamplingParams) -> None:
    """Raise ParamError for a field without effect because another one is missing."""
    for name, other in GOES_WITH.items():
        if getattr(params, other) is None and getattr(params, name) != getattr(NEUTRAL, name):
            raise ParamError(name, f"{name} goes with {other}; give that too, or leave it out")


BYTES = (bytes, bytearray, memoryview)
PROMPT_FORMS = 'a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
    """One prompt or many: a text, a list of texts, token ids, a list of those, or dicts as `as_prompt` takes them. Raises
    TypeError."""
    prompts = plain_value(prompts)
    if isinstance(prompts, (str, Mapping, *BYTES)) or not isinstance(prompts, Iterable):
        return [as_prompt(prompts)]
    batch = list(map(plain_value, prompts))
    if any(hasattr(item, "__index__") for item in batch):
        return [_token_ids(batch)]
    return [as_prompt(item) for item in batch]


def as_prompt(prompt: Prompt) -> PlainPrompt:
    """One prompt as a text or a list of ints. Ids may be of any type with `__index__`, such as arrays of numpy and torch.
    Raises TypeError for anything else."""
    plain: Any = plain_value(prompt)
    if isinstance(plain, Mapping):
        if len(plain) != 1 or not plain.keys() <= {"prompt", "prompt_token_ids"}:
            raise TypeError(f"a prompt dict has one key, prompt or prompt_token_ids, not {list(plain)}")
        ((name, plain),) = [(name, plain_value(value)) for name, value in plain.items()]
        if isinstance(plain, str) != (name == "prompt"):
            raise TypeError(f"{name} of a prompt dict must be {'text' if name == 'prompt' else 'token ids'}, not {plain!r:.80}")
    if isinstance(plain, str):
        return str(plain)
    if isinstance(plain, BYTES) or not isinstance(plain, Iterable):
        raise TypeError(f"a prompt must be {PROMPT_FORMS}, not {plain!r:.80}")
    return _token_ids(plain)


def _token_ids(values: Iterable[Any]) -> list[int]:
    return [value if type(value) is int else _token_id(value) for value in values]


def _token_id(value: Any) -> int:
    plain = plain_value(value)
    if isinstance(plain, bool) or not hasattr(plain, "__index__"):
        raise TypeError(f"token ids must be integers, not {plain!r:.80}")
    return index(plain)


def as_conversations(messages: str | Messages | Sequence[str | Messages]) -> list[Messages]:
    """One conversation or many; a text stands for a message of the user. Raises TypeError."""
    if isinstance(messages, (bytes, bytearray, Mapping)) or not isinstance(messages, (str, Sequence)):
        raise TypeError(f"messages must be a text, a list of {{role, content}}, or a list of these, not {messages!r:.80}")
    talks: Any = [messages] if isinstance(messages, str) or (messages and isinstance(messages[0], Mapping)) else messages
    return [[{"role": "user", "content": talk}] if isinstance(talk, str) else talk for talk in talks]


def params_for_prompts(
    count: int,
    params: Params | Sequence[Params] | None,
    sampling_params: Params | Sequence[Params] | None,
    changes: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> list[SamplingParams]:
    """The parameters of `count` prompts, given under either name, with single settings (`changes`) applied.

    Without parameters the model's `own` settings apply, or neutral ones. Raises TypeError for an unknown setting, ValueError
    (ParamError) for an invalid one.
    """
    made = _settings_of(params, sampling_params, changes, own)
    if isinstance(made, Params):
        made = [made] * count
    if len(made) != count:
        raise ValueError(f"{count} prompts and {len(made)} params; give one for all or one each")
    return [one.sampling() if isinstance(one, BeamSearchParams) else one for one in made]


def _settings_of(
    params: Params | Sequence[Params] | None,
    sampling_params: Params | Sequence[Params] | None,
    changes: Mapping[str, Any],
    own: Mapping[str, Any] | None,
) -> Params | Sequence[Params]:
    if params is not None and sampling_params is not None:
        raise TypeError("params and sampling_params are two names of one argument; give one of them")
    params = sampling_params if params is None else params
    if unknown := [name for name in changes if name not in SETTINGS]:
        question = did_you_mean(unknown[0], SETTINGS, "help(headrace.SamplingParams) has them all")
        raise TypeError(f"there is no setting {unknown[0]!r}; {question}")
    if params is None:
        return params_of(changes, own)
    if not changes:
        return params
    if isinstance(params, Params):
        return msgspec.structs.replace(params, **changes)
    return [msgspec.structs.replace(one, **changes) for one in params]


def only_known(settings: Mapping[str, Any], function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the settings. Raises TypeError for one that `function` has no parameter for."""
    known = function.__kwdefaults__ or {}
    if unknown := [name for name in settings if name not in known]:
        question = did_you_mean(unknown[0], known, f"it takes {', '.join(known)}")
        raise TypeError(f"there is no setting {unknown[0]!r}; {question}")
    return settings


def template_variables(given: Mapping[str, Any], reads: Callable[[str], bool]) -> dict[str, Any]:
    """The keywords of a call that are template variables, not settings. reads: whether the model's template reads a name.

    Raises TypeError for a keyword that is neither.
    """
    variables = {name: value for name, value in given.items() if name not in SETTINGS}
    for name in variables:
        if not reads(name):
            other = did_you_mean(name, CHAT, "chat_template_kwargs passes other variables to the template")
            raise TypeError(
                f"{name!r} is neither a setting nor a variable of the template; {did_you_mean(name, SETTINGS, other)}"
            )
    return variables


def check_variables(given: Iterable[str], reads: Callable[[str], bool]) -> None:
    """Raise TypeError for a keyword of `LLM.render` that the template does not read."""
    for name in given:
        if name not in RENDER and not reads(name):
            other = did_you_mean(name, RENDER, "chat_template_kwargs passes other variables to it")
            raise TypeError(f"{name!r} is not a variable of the template; {other}")
