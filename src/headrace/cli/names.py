"""add, cp: names for models, with settings, a system prompt and a chat template of their own."""

from dataclasses import asdict, dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.cli.help import short_help
from headrace.cli.options import DRAWS, SAMPLING_PANEL, ModelName, option_fields, with_groups
from headrace.cli.output import say
from headrace.data.params import ParamError
from headrace.weights import catalog, names
from headrace.weights.defaults import summary
from headrace.weights.names import Name
from headrace.weights.store import StoreError, expand

Settings: Any = make_dataclass("Settings", option_fields(DRAWS, SAMPLING_PANEL))
NewName = Annotated[str, typer.Argument(metavar="NAME", help="The new name.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    add_help = short_help(
        "system template temperature top_k top_p min_p max_tokens stop",
        ("headrace add mill ~/models/mill.Q4_K_M.gguf -t 0.3", "Every command, the server and Python then accept mill."),
        ('headrace add brief smollm2-135m --system "Answer in one sentence."', "The same model with another beginning."),
    )
    copy_help = short_help(
        "system template temperature top_k top_p min_p max_tokens stop",
        ("headrace cp mill calm -t 0", "The same model with another temperature."),
    )
    app.command(cls=add_help)(with_groups(add))
    app.command("cp", cls=copy_help)(with_groups(copy))


@dataclass
class OwnSettings(Settings):
    """Settings that belong to a name."""

    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may be repeated.", rich_help_panel=SAMPLING_PANEL)
    ] = None
    template: Annotated[
        Path | None, typer.Option(help="File with a chat template that replaces the model's.", exists=True, dir_okay=False)
    ] = None

    system: Annotated[str | None, typer.Option(help='System prompt of conversations without one ("": none).')] = None

    def on(self, name: Name) -> Name:
        """The name with these settings. Raises typer.BadParameter."""
        words = ("template", "system")
        sampling = {key: value for key, value in asdict(self).items() if value not in (None, []) and key not in words}
        template = self.template.read_text("utf-8") if self.template is not None else name.template
        try:
            system = name.system if self.system is None else self.system
            return Name(name.name, name.model, {**name.sampling, **sampling}, template, system)
        except ParamError as error:
            raise typer.BadParameter(str(error)) from None


def add(name: NewName, model: ModelName, settings: OwnSettings) -> None:
    """Give a model a name with settings, a system prompt and a chat template.

    Every command, the server and Python accept the name. Adding a name again replaces it. Files are not moved.
    """
    path = expand(model)
    local = path.exists() and model not in catalog.load()
    _keep(settings.on(Name(name, str(path.absolute()) if local else model)))


def copy(
    source: ModelName,
    name: NewName,
    settings: OwnSettings,
) -> None:
    """Give a named model a second name with other settings. No file is copied."""
    known = names.find(source)
    if known is None:
        add(name, source, settings)
    else:
        _keep(settings.on(Name(name, known.model, known.sampling, known.template, known.system)))


def _keep(name: Name) -> None:
    """Save a name after the model and its template have been read. Raises StoreError, and as opening does."""
    from headrace.startup.opening import open_model
    from headrace.weights.hub import resolve

    if name.name in catalog.load():
        raise StoreError(f"{name.name} is a name of the catalog; choose another")
    if names.find(name.model) is not None:
        raise StoreError(f"{name.model} is a name itself; headrace cp {name.model} {name.name} gives it another")
    resolve(name.model, download=False)
    before = names.find(name.name)
    names.save(name)
    try:
        opened = open_model(name.name, download=False)
        if name.template is not None or name.system:
            opened.template.render(opened.with_system([{"role": "user", "content": "hi"}]))
    except Exception:
        names.remove(name.name) if before is None else names.save(before)
        raise
    settings = "an encoder, for embeddings and classes" if opened.config.encoder else summary(opened.defaults)
    say(f"{name.name}: {opened.path}, {settings}")
