"""A setting of a model is declared once: an example appears in `LLM`, --help, `serve --config` and the reference."""

import inspect
from dataclasses import make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from headrace.cli import serve_options
from headrace.cli.options import WeightOptions, setting_fields, with_groups
from headrace.cli.serve_options import MODELS, read_config
from headrace.data import fields
from headrace.data.settings import ModelSettings, Setting, SettingGroup, option_settings
from headrace.llm import LLM
from tests.reference.params import setting
from tests.tiny_files import write_tiny_gguf


class Pinned(ModelSettings, frozen=True, kw_only=True):
    """The settings of a model, and one more."""

    pinned_core: Annotated[int | None, Setting("The core that runs the engine", group=SettingGroup.OPENING, ge=0)] = None


def differences(settings: type[msgspec.Struct]) -> list[str]:
    """The settings that `LLM` lacks, or has with another type or default; and parameters that are not declared."""
    given, hints = inspect.signature(LLM).parameters, get_type_hints(LLM.__init__)
    kinds = get_type_hints(settings)
    declared = dict(zip(settings.__struct_fields__, settings.__struct_defaults__, strict=True))
    extra = given.keys() - declared.keys() - {"model", "progress"}
    return sorted(extra) + [
        name
        for name, default in declared.items()
        if name not in given or (given[name].default, hints[name]) != (default, kinds[name])
    ]


def command_of(settings: type[msgspec.Struct], heard: list[Any]) -> typer.Typer:
    """A command like `serve`, with the options of `settings` and a --config file."""
    fields = setting_fields(option_settings(SettingGroup.OPENING, of=settings))
    options: Any = make_dataclass("Options", fields, bases=(WeightOptions,))

    def serve(
        context: typer.Context,
        options: options,
        config: Annotated[Path | None, typer.Option(is_eager=True, callback=read_config)] = None,
    ) -> None:
        heard.append((vars(options), context.meta.get(MODELS)))

    app = typer.Typer()
    app.command()(with_groups(serve))
    return app


def test_the_parameters_of_llm_are_the_declared_settings() -> None:
    assert differences(ModelSettings) == []
    assert differences(Pinned) == ["pinned_core"]  # the control


def test_a_model_is_opened_with_a_settings_object(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with LLM.from_settings(path, Pinned(threads=1, pinned_core=2)) as llm, LLM(path, threads=1) as plain:
        assert isinstance(llm.settings, Pinned)
        assert (llm.settings.pinned_core, llm.settings.device) == (2, plain.settings.device)
        found, expected = (each.generate([3, 1, 4], temperature=0)[0].outputs[0].token_ids for each in (llm, plain))
        assert found == expected
    assert plain.settings == ModelSettings(threads=1, device=plain.device)


def test_a_setting_is_an_option_and_a_line_of_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, heard = CliRunner(env={"COLUMNS": "200"}), list[Any]()
    app, plain = command_of(Pinned, heard), command_of(ModelSettings, heard)
    assert "The core that runs the engine." in runner.invoke(app, ["--help"]).output
    assert "pinned" not in runner.invoke(plain, ["--help"]).output
    config = tmp_path / "serve.toml"
    config.write_text('pinned_core = 3\n[[models]]\nmodel = "small"\npinned-core = 4\n')
    assert runner.invoke(app, ["--config", str(config)]).exit_code != 0  # a model of the file has the declared settings alone
    monkeypatch.setattr(serve_options, "MODEL_OPTIONS", [one.name for one in option_settings(of=Pinned)])
    assert runner.invoke(app, ["--config", str(config)]).exit_code == 0
    ((options, (model,)),) = heard
    assert (options["pinned_core"], options["threads"], model.options) == (3, None, {"pinned_core": 4})
    assert runner.invoke(plain, ["--config", str(config)]).exit_code != 0


def test_a_setting_is_an_entry_of_the_reference() -> None:
    *known, added = map(setting, fields.declared(Pinned))
    assert known == list(map(setting, fields.declared(ModelSettings)))
    assert added == "* `pinned_core`, `--pinned-core`: The core that runs the engine."
