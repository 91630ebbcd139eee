"""Opening of a model for a command: downloads it if missing, and reports on stderr."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.cli.options import HelperOptions, SamplingOptions, WeightOptions
from headrace.cli.output import moving, say, status
from headrace.cli.terminal import note
from headrace.data.progress import Moving, human_size


def fetch(model: str) -> Path:
    """Return the model's local file or folder, downloaded if missing. A folder of trained heads is returned unchanged."""
    if (Path(model) / "heads.json").is_file():
        return Path(model)
    from headrace.weights import catalog
    from headrace.weights.hub import resolve
    from headrace.weights.store import Store

    entries = catalog.load()
    if model in entries and Store().find(model) is None:
        say(f"{model}: {human_size(entries[model].size)}, licence {entries[model].licence}")
    try:
        return resolve(model, entries=entries, progress=status())
    except KeyboardInterrupt:
        say(f"{model}: stopped; the same command continues")
        raise


def look_at(model: str) -> Any:
    """Open a model's files, to find errors before anything heavy is loaded. Returns None for trained heads.

    Raises ValueError.
    """
    path = fetch(model)
    if (path / "heads.json").is_file():
        return None
    from headrace.startup.opening import open_files

    return open_files(model)


def open_llm(
    model: str,
    options: WeightOptions,
    *,
    quiet: bool = False,
    sampling: SamplingOptions | None = None,
    given: Mapping[str, Any] | None = None,
    chat_template: str | None = None,
    speech: bool = False,
    **more: Any,
) -> Any:
    """Open a `headrace.llm.LLM`.

    sampling, given: prints the settings in force. chat_template: refused before loading if the model has no template of
    this name. speech: of a command that reads sound; others refuse a speech model. more: further settings of the LLM.
    """
    from headrace.startup.adapters import named_adapters

    settings = options.settings(**more)
    adapters = list(named_adapters(settings.adapter))
    if len(adapters) > 1:
        raise ValueError("adapter: a command uses one adapter; give one, or serve several (headrace serve)")
    opened, *_ = [look_at(str(name)) for name in (model, *settings.companions)]
    # Imported late: a model that is not there is refused at once.
    from headrace.startup.backend import check_arguments

    check_arguments(settings, opened)
    if isinstance(options, HelperOptions) and opened is not None and opened.config.encoder:
        raise ValueError(f"{model} is an encoder and cannot generate text; use headrace embed")
    if opened is not None and opened.config.reads_sound and not speech:
        raise ValueError(f"{model} is a speech model and reads no text; use headrace transcribe")
    if chat_template is not None and opened is not None:
        opened.template.choose(chat_template)
    if sampling is not None and not quiet and opened is not None:
        note(f"{model}: {sampling.summary(opened.defaults, **given or {})}")
    progress, name = moving(quiet), Path(model).name
    progress.start(f"loading {name}")
    if not quiet and not isinstance(status(), Moving):
        say(f"loading {name}")
    from headrace.llm import LLM

    llm = LLM.from_settings(model, settings, progress=progress)
    llm.callers.adapter = "".join(adapters)
    if not quiet:
        numbers = llm.opened.settings_summary(llm.settings)
        note(f"{model}: {llm.dtype} on {llm.device} ({llm.backend}, {llm.exactness}), {llm.memory_plan.summary}{numbers}")
        if isinstance(options, HelperOptions):
            _say_calibrated(llm, options)
    return llm


def _say_calibrated(llm: Any, options: HelperOptions) -> None:
    """Print the calibrated thresholds of the model's exits, or of its smaller model."""
    from headrace.startup.thresholds import load_for

    smaller = None if options.cascade is None else fetch(options.cascade)
    for rule in load_for(llm.opened, llm.settings, smaller):
        note(f"calibrated: {rule.summary()}")
