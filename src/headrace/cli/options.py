"""Options that several commands share: opening a model, sampling, and output files, which are checked before any work."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from msgspec import to_builtins

from headrace import host
from headrace.cli.help import HelpAll, complete_model
from headrace.cli.output import say
from headrace.data.explicit import applicable_settings, params_of
from headrace.data.fields import Declared, Use, declared
from headrace.data.params import FILTERS, PRESETS, BeamSearchParams, ParamError, RefineParams, SamplingParams
from headrace.data.settings import ModelSettings, SettingGroup, option_settings
from headrace.data.structured import StructuredOutputs
from headrace.weights.defaults import Defaults, SamplingDefaults, Setting, summary, values

MODEL_PANEL, SAMPLING_PANEL, CHOICE_PANEL = "Model", "Sampling", "Beams, best of several, blocks"
FORM_PANEL = "Form of the answer"

SystemPrompt = Annotated[
    str | None, typer.Option("--system", help="System prompt (default: that of the name, the catalog or the template).")
]
TemplateName = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="NAME",
        help="One of the model's named chat templates (default: default).",
        show_default=False,
    ),
]
ShowExits = Annotated[
    bool, typer.Option("--show-exits", help="Colour tokens from an early exit or a smaller model, and count them.")
]
ShowExitsOfMany = Annotated[bool, typer.Option("--show-exits", help="Count tokens by exit layer, or by model of a cascade.")]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A name that `headrace list` shows, a .gguf file, a folder with safetensors, or a repository of the model hub.",
        autocompletion=complete_model,
    ),
]


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command for typer: parameters that are dataclasses of options become their fields, and --help-all is added.

    Names of Python arguments in error messages become option names.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: one.annotation for name, one in signature.parameters.items() if is_dataclass(one.annotation)
    }
    parameters = []
    for name, parameter in signature.parameters.items():
        flat = inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]
        parameters += [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in flat]

    parameters.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=HelpAll))

    def call(**values: Any) -> Any:
        values.pop("help_all", None)
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        try:
            return command(**values)
        except typer.BadParameter as error:
            error.message = as_options(error.message, call.__annotations__)
            raise
        except ValueError as error:
            if error.args == (str(error),):
                error.args = (as_options(str(error), call.__annotations__),)
            raise

    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    call.__name__, call.__doc__ = command.__name__, "\n\n".join(" ".join(one.split()) for one in paragraphs)
    call.__annotations__ = {one.name: one.annotation for one in parameters}
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call


def as_options(text: str, names: Iterable[str]) -> str:
    """Write argument names in a message as options: kv_cache_memory=1 becomes --kv-cache-memory 1.

    A name without an underscore may be an ordinary word, so it is replaced only before "=value".
    """
    known = "|".join(names)
    text = re.sub(rf"\b({known})=(['\"]?)([\w.]+)\2", lambda match: f"--{match[1].replace('_', '-')} {match[3]}", text)
    long = "|".join(name for name in names if "_" in name)
    return re.sub(rf"(?<![\w./-])({long})s?(?![\w/])", lambda match: f"--{match[1].replace('_', '-')}", text)


def _sampling(help: str) -> Any:
    return typer.Option(help=help, rich_help_panel=SAMPLING_PANEL)


def _form(help: str, **more: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=FORM_PANEL, **more)


# Types that one value on the command line can have.
KINDS: dict[Any, Any] = {
    str: str,
    bool: bool,
    int: int,
    float: float,
    bool | Literal["never"]: Literal["true", "false", "never"],
}


def option_kind(one: Declared) -> Any:
    """The type of a declared field on the command line; None if one value cannot give it."""
    origin = get_origin(one.kind)
    return str if origin is Literal or (origin is Union and str in get_args(one.kind)) else KINDS.get(one.kind)


def option_fields(fields: Iterable[Declared], panel: str) -> list[tuple[str, Any, None]]:
    """Rows for `make_dataclass`: an option for each declared field of a type in `KINDS`. None: the option was not given."""
    rows: list[tuple[str, Any, None]] = []
    for one in fields:
        kind = option_kind(one)
        if kind is not None and one.field.doc and one.field.option is not None:
            names = [f"--{one.flat.replace('_', '-')}", *one.field.option.split()]
            option = typer.Option(*names, help=one.field.help, rich_help_panel=panel)
            rows.append((one.flat, Annotated[kind | None, option], None))
    return rows


def setting_fields(settings: Iterable[Declared], panel: str = MODEL_PANEL, **more: Any) -> list[tuple[str, Any, Any]]:
    """Rows for `make_dataclass`: an option for each setting of `LLM`, with its default. `more`: arguments of `typer.Option`."""
    rows = []
    for one in settings:
        several = getattr(one.field, "several", False)
        kind = list[str] if several else option_kind(one)
        option = typer.Option(help=one.field.help, rich_help_panel=panel, **more)
        rows.append((one.name, Annotated[kind | None if one.optional else kind, option], one.default))
    return rows


Opening: Any = make_dataclass("Opening", setting_fields(option_settings(SettingGroup.OPENING)))


class WeightOptions(Opening):
    """Options of every command that opens a model."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, list):  # an option that was repeated
                setattr(self, name, ",".join(value) or None)

    def settings(self, **more: Any) -> ModelSettings:
        """The settings that were given; `more` are those that are not options."""
        return ModelSettings(**{**asdict(self), **more})

    def check(self) -> None:
        """Raises typer.BadParameter for a number out of its range."""
        for one in option_settings(SettingGroup.OPENING):
            value = getattr(self, one.name)
            if isinstance(value, int) and not one.field.holds(value):
                raise typer.BadParameter(f"--{one.name.replace('_', '-')} must be {one.field.bounds}, not {value}")
        if self.threads is not None and self.threads > (cores := host.cores()):
            say(f"headrace: {self.threads} threads on {cores} cores wait for each other; --threads {cores} is faster")


Generating: Any = make_dataclass("Generating", setting_fields(option_settings(SettingGroup.GENERATING)), bases=(WeightOptions,))


class HelperOptions(Generating):
    """These, and the drafters, exits and smaller models of a model that generates."""


Decoding: Any = make_dataclass("Decoding", setting_fields(option_settings(SettingGroup.DECODING)), bases=(HelperOptions,))


class ModelOptions(Decoding):
    """These, and what the other decoding methods need."""


Preset = Annotated[
    Literal["precise", "balanced", "creative"] | None,
    _sampling("precise (greedy), balanced or creative, instead of the model's own settings."),
]
DRAWS = [one for one in declared(SamplingParams) if one.name != "best_of"]
SHOWN = {one.name for one in DRAWS if Use.CORE in one.field.use} | {
    *("beam_width", "penalty_alpha", "contrastive_beta", "defer_rule", "refine_block"),
}
CHOOSES = [
    *(one for one in declared(SamplingParams) if one.name == "best_of"),
    *(*declared(BeamSearchParams), *declared(RefineParams)),
]
Drawing: Any = make_dataclass("Drawing", [("preset", Preset, None), *option_fields(DRAWS, SAMPLING_PANEL)])
Choosing: Any = make_dataclass("Choosing", option_fields(CHOOSES, CHOICE_PANEL))
LEAVES = [one for one in DRAWS if one.name.startswith(("exit_", "cascade_"))]
Leaving: Any = make_dataclass("Leaving", option_fields(LEAVES, SAMPLING_PANEL))


@dataclass
class SamplingOptions(Drawing):
    """Sampling options. Defaults are the catalog's or the model's own settings."""

    sampling_defaults: Annotated[
        SamplingDefaults, _sampling("Settings that are not given: the model's own, or neutral ones (for evaluations).")
    ] = "model"
    dry_breaker: Annotated[list[str] | None, _sampling("DRY: text that ends a repetition; may be repeated.")] = None
    logit_bias: Annotated[list[str] | None, _sampling("ID=BIAS, added to the token's logit; may be repeated.")] = None
    bad_word: Annotated[list[str] | None, _sampling("Excluded text; may be repeated.")] = None
    stop: Annotated[list[str] | None, _sampling("Text that ends the answer; may be repeated.")] = None
    stop_token_id: Annotated[list[int] | None, _sampling("Token that ends the answer; may be repeated.")] = None
    json_schema: Annotated[
        Path | None, _form("The answer is JSON that fits the schema in this file.", exists=True, dir_okay=False)
    ] = None
    regex: Annotated[str | None, _form("The answer matches this regular expression.")] = None
    grammar: Annotated[
        Path | None, _form("The answer fits the grammar (Lark or GBNF) in this file.", exists=True, dir_okay=False)
    ] = None
    choice: Annotated[list[str] | None, _form("The answer is one of these texts; may be repeated.")] = None

    def changes(self) -> dict[str, Any]:
        """The given fields of SamplingParams. Raises typer.BadParameter for invalid values."""
        renamed = {"stop_token_id": "stop_token_ids"}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {renamed.get(name, name): value for name, value in given.items() if value not in (None, [])}
        given.pop("preset", None)
        given.pop("sampling_defaults", None)
        forms = {name: given.pop(name) for name in ("json_schema", "regex", "grammar", "choice") if name in given}
        if forms:
            given["structured_outputs"] = {
                name.removesuffix("_schema"): _content(value) if isinstance(value, Path) else value
                for name, value in forms.items()
            }
        texts = {"bad_words": given.pop("bad_word", []), "dry_breakers": given.pop("dry_breaker", [])}
        if "logit_bias" in given:
            given["logit_bias"] = dict(map(_bias, given["logit_bias"]))
        try:
            params_of({"max_tokens": None, **given})
        except ParamError as error:
            raise typer.BadParameter(str(error)) from None
        return given | {name: words for name, words in texts.items() if words}

    def settings(self) -> dict[str, Any]:
        """The given options as plain data."""
        neutral = {"sampling_defaults": "neutral"} if self.sampling_defaults == "neutral" else {}
        return self.changes() | ({"preset": self.preset} if self.preset else {}) | neutral

    def bind(self, llm: Any, own_of: Callable[[Defaults], dict[str, Any]] = values) -> Callable[..., SamplingParams]:
        """Return a function that makes parameters for an opened `LLM`: its own settings or the preset, then the given options,
        then the call's changes. own_of: selects from the model's settings."""
        return bound(llm, self.settings(), own_of)

    def summary(self, defaults: Defaults, **more: Any) -> str:
        """One line with the settings in force and their sources. more: other given settings."""
        given = {**self.changes(), **{name: value for name, value in more.items() if value is not None}}
        defaults = {} if self.sampling_defaults == "neutral" else defaults
        if self.preset is not None:
            defaults = {name: Setting(value, "preset", self.preset) for name, value in PRESETS[self.preset].items()}
        heeds = SHOWN & set(applicable_settings(values(defaults), given))
        defaults = {name: one for name, one in defaults.items() if name in heeds}
        shown = {name: value for name, value in given.items() if name in SHOWN}
        temperature = shown.get("temperature", values(defaults).get("temperature", 1.0))
        if temperature < 0.01 or not given.keys().isdisjoint(("beam_width", "refine_block")):  # nothing is drawn
            defaults = {name: one for name, one in defaults.items() if name not in FILTERS}
        return summary(defaults, shown)


class ChoiceOptions(Choosing):
    """Options of methods whose answer is known only at the end, so it is not streamed: beam search, best of n, refine."""

    def changes(self) -> dict[str, Any]:
        """The given fields, for `params_of`. Raises typer.BadParameter for invalid values."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}
        if self.early_stopping is not None:
            given["early_stopping"] = {"true": True, "false": False, "never": "never"}[self.early_stopping]
        try:
            params_of(given)
        except ParamError as error:
            raise typer.BadParameter(str(error)) from None
        return given


def bound(
    llm: Any, settings: Mapping[str, Any], own_of: Callable[[Defaults], dict[str, Any]] = values
) -> Callable[..., SamplingParams]:
    """`SamplingOptions.bind` for its settings as plain data."""
    given = dict(settings)
    preset, neutral = given.pop("preset", None), given.pop("sampling_defaults", None) == "neutral"
    if words := given.pop("bad_words", None):
        given["bad_words"] = [ids for word in words for ids in _spellings(llm.tokenizer, word)]
    if words := given.pop("dry_breakers", None):
        given["dry_breakers"] = [ids[-1] for word in words for ids in _spellings(llm.tokenizer, word)]
    defaults = {} if neutral else own_of(llm.opened.defaults)
    own = {"max_tokens": None, **(defaults if preset is None else PRESETS[preset])}

    def params(**changes: Any) -> SamplingParams:
        return params_of({**given, **changes}, own)

    return params


class LeavingOptions(Leaving):
    """Options of early exit and of cascades by token."""

    def changes(self) -> dict[str, Any]:
        """The given fields of SamplingParams."""
        return {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) is not None}


def check(options: ModelOptions, sampling: SamplingOptions, choice: ChoiceOptions | None = None, **more: Any) -> None:
    """Check options before a model is opened. more: other fields of the parameters. Raises typer.BadParameter."""
    options.check()
    given = sampling.changes() | (choice.changes() if choice is not None else {}) | more
    for name in ("contrastive_beta", "defer_rule"):
        if given.get(name) is not None and options.amateur is None:
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} needs a smaller model of the same vocabulary: --amateur MODEL")
    for name, method in (("beam_width", "beam search"), ("refine_block", "refine")):
        if given.get(name) is not None and sampling.preset is not None:
            raise typer.BadParameter(f"--preset sets how tokens are sampled, and {method} does not sample; leave it out")
    check_helpers(options, given)
    # Texts are tokenized when the model is open; any token stands for them here.
    stand_in = {"bad_words": ((0,),), "dry_breakers": (0,)}
    given |= {name: tokens for name, tokens in stand_in.items() if name in given}
    try:
        params = params_of({"max_tokens": None, **given})
    except ParamError as error:
        raise typer.BadParameter(str(error)) from None
    if params.structured_outputs is not None:
        _check_form(params.structured_outputs)


def check_helpers(options: HelperOptions, given: Mapping[str, Any]) -> None:
    """Raise typer.BadParameter for fields that need another model or exits without their option."""
    if given.get("exit_threshold") is not None and options.exits is None:
        raise typer.BadParameter("--exit-threshold needs exits of the model: --exits FOLDER (headrace train-heads --kind exit)")
    if given.get("cascade_threshold") is not None and options.cascade is None:
        raise typer.BadParameter("--cascade-threshold needs a smaller model of the same vocabulary: --cascade MODEL")


def _check_form(form: StructuredOutputs) -> None:
    """Raise typer.BadParameter for an invalid constraint."""
    from headrace.decoding.constraint_check import inspect_constraint

    if problem := inspect_constraint({"spec": to_builtins(form)}).get("error"):
        raise typer.BadParameter(problem)


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as text ({error}); give another file") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias takes ID=BIAS, as in 42=-5, not {text!r}") from None


def _spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """Token ids of a word at the beginning of a text and after a space."""
    spellings = [tokenizer.encode(text, add_special=False, parse_special=False) for text in (word, f" {word}")]
    return [list(ids) for ids in dict.fromkeys(map(tuple, spellings)) if ids]


def writable(path: Path | None) -> Path | None:
    """Check a file to write. Creates nothing, so a killed command leaves no empty file. Raises typer.BadParameter."""
    if path is not None and writable_output(path) is not None and path.exists() and not path.is_file():
        raise typer.BadParameter(f"{path} is not a file; name a file")
    return path


def writable_output(path: Path | None) -> Path | None:
    """Check a file or a folder to write, which may exist. Raises typer.BadParameter."""
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist; create it first")
    try:
        if path.is_file():
            os.close(os.open(path, os.O_WRONLY))
        elif not path.exists():
            with TemporaryFile(dir=folder):
                pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written ({error.strerror}); give another name") from None
    return path


def writable_folder(path: Path | None) -> Path | None:
    """Check a folder to write into, which may be missing. Raises typer.BadParameter."""
    if path is None:
        return None
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written into ({error.strerror}); name another folder") from None
    finally:
        for folder in new:
            with suppress(OSError):
                folder.rmdir()
    return path
