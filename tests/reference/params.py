"""Reference of request parameters and model settings, from their declarations."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, get_args, get_origin

import msgspec

from headrace.data.fields import BIASES, ID_LISTS, IDS, TEXTS, Declared, declared
from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams, StructuredOutputs, TimestampParams
from headrace.data.settings import ModelSettings, Setting, SettingGroup
from tests.pages import item


def sampling() -> str:
    """Fields of the three classes of parameters."""
    parts = []
    for params in (SamplingParams, BeamSearchParams, RefineParams):
        parts += [f"## {params.__name__}", "\n".join(entries(params))]
    return "\n\n".join(parts)


def entries(params: type[msgspec.Struct]) -> Iterator[str]:
    """One entry for each field with a help text."""
    for one in declared(params):
        if one.field.doc:
            flat = "" if one.flat == one.name else f", in requests and options `{one.flat}`"
            yield item(f"`{one.name}`{flat}", f"{one.field.doc}. *{limits(one)}*")


def limits(one: Declared) -> str:
    """Range and default in a sentence."""
    text = f"{values(one)}; default {default(one)}" if default(one) else values(one)
    return f"{text[0].upper()}{text[1:]}."


def values(one: Declared) -> str:
    """Range, choices or length of a value."""
    field = one.field
    known: dict[Any, str] = {
        int: field.bounds if field.bounds != "a finite number" else "a whole number",
        float: field.bounds,
        bool: "true, false",
        str: "a name",
        TEXTS: f"{field.most} texts",
        IDS: f"{field.most} token ids",
        ID_LISTS: f"{field.most} lists of {field.each} token ids",
        BIASES: f"{field.most} token ids, each {field.bounds}",
        StructuredOutputs: "`StructuredOutputs`",
        BeamSearchParams: "`BeamSearchParams`",
        RefineParams: "`RefineParams`",
        TimestampParams: "`TimestampParams`",
    }
    if one.kind in known:
        return known[one.kind]
    if get_origin(one.kind) is Literal:
        return ", ".join(get_args(one.kind))
    return ", ".join(values(replace(one, kind=way)) for way in get_args(one.kind))


def default(one: Declared) -> str:
    """The default as it is typed in JSON; empty if there is none."""
    return "" if one.default in (None, ()) else str(one.default).lower()


def settings() -> str:
    """Settings of a model, by the commands that have an option for them."""
    parts = []
    for group in SettingGroup:
        found = [one for one in declared(ModelSettings) if isinstance(one.field, Setting) and one.field.group is group]
        parts += [f"## {group.value[0].upper()}{group.value[1:]}", "\n".join(map(setting, found))]
    return "\n\n".join(parts)


def setting(one: Declared) -> str:
    """The entry of a setting: its name, its option, its help text and default."""
    assert isinstance(one.field, Setting)
    option = "" if one.field.group is SettingGroup.PYTHON else f", `--{one.name.replace('_', '-')}`"
    preset = f" *Default {default(one)}.*" if default(one) else ""
    return item(f"`{one.name}`{option}", f"{one.field.doc}.{preset}")
