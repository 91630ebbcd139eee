"""Pages on the statements of the seed texts, in English and Chinese, made from docs/data/seeds.toml and seed_sections.toml."""

import tomllib
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from tests.pages import DOCS
from tests.wrapping import COLUMNS, joined, wrapped

PAGES = {language: DOCS / language / "understand" / "seeds.md" for language in ("en", "zh")}
ENGLISH = "../../en/understand/"
GLOSSARY = {"en": "#terms-that-the-seeds-only-name", "zh": "#种子只提到名字的术语"}
WORDS = {
    "en": {
        "wrong": "**Wrong.**",
        "imprecise": "*Imprecise.*",
        "none": "No test: no code of Headrace depends on it.",
        "where": "{seed}, line {line}:",
    },
    "zh": {
        # A mark that ends with punctuation would not close before a Chinese character.
        "wrong": "**错误**：",
        "imprecise": "*不准确*：",
        "none": "没有测试：Headrace 没有依赖它的代码。",
        "where": "{seed} 第 {line} 行：",
    },
}


def load(name: str) -> dict[str, Any]:
    """A data file of the pages."""
    return tomllib.loads((DOCS / "data" / name).read_text("utf-8"))


def sections(language: str = "en") -> str:
    """A list for each seed: from each of its sections to the command and the page that show it."""
    data, parts = load("seed_sections.toml"), []
    for seed, about in data["seeds"].items():
        parts.append(f"### {seed}")
        note = "以下链接指向英文页面（英文）。" if language == "zh" else ""
        parts.append("\n".join(wrapped(about[language] + note)))
        parts.append("\n".join(line for one in data["section"] if one["seed"] == seed for line in section(one, language)))
    return "\n\n".join(parts)


def section(one: dict[str, Any], language: str) -> Iterator[str]:
    """The entry of one section: lines, title with its page, command, statements."""
    page = one["page"].removeprefix("seeds.md")
    if language == "zh" and page == GLOSSARY["en"]:
        page = GLOSSARY["zh"]
    prefix = ENGLISH if language == "zh" and not page.startswith("#") else ""
    title = one["title"] if language == "zh" else one["en"]
    links = [f"[W{number}](#w{number})" for number in one["statements"]]
    if language == "en":
        command = f": `{one['run']}`" if one["run"] else ""
        numbers = f" ({', '.join(links)})" if links else ""
        text = f"{one['lines']} [{title}]({page}){command}{numbers}"
    else:
        command = f"：`{one['run']}`" if one["run"] else ""
        numbers = f"（{'、'.join(links)}）" if links else ""
        text = f"{one['lines']} “[{title}]({prefix}{page})”{command}{numbers}"
    for number, line in enumerate(wrapped(text, COLUMNS - 2)):
        yield f"{'  ' if number else '* '}{line}"


def statements(language: str = "en") -> str:
    """All statements, by topic: the Chinese sentence with its line, what is true, and the tests."""
    data = load("seeds.toml")
    parts = []
    for topic in data["topic"]:
        parts.append(f"## {topic[language]}")
        parts += [entry(one, language) for one in data["statement"] if one["topic"] == topic["id"]]
    return "\n\n".join(parts)


def entry(one: dict[str, Any], language: str) -> str:
    """One statement."""
    words = WORDS[language]
    places = [(one["seed"], one["line"], one["quote"]), *one.get("also", [])]
    blank = "" if language == "zh" else " "
    quoted = [f"{words['where'].format(seed=seed, line=line)}{blank}“{quote}”" for seed, line, quote in places]
    verdict = words["wrong"] if one["wrong"] else words["imprecise"]
    english = f"“{one['says']}” {verdict} {' '.join(one['en'].split())}"
    answer = english if language == "en" else verdict + joined(one["zh"])
    lines = [f"### W{one['id']}", ""]
    for place in quoted:
        lines += [*(f"> {line}" for line in wrapped(plain(place), COLUMNS - 2)), ">"]
    lines[-1] = ""
    return "\n".join([*lines, *wrapped(answer), "", *tests(one["tests"], words)])


def tests(names: list[str], words: dict[str, str]) -> Iterator[str]:
    """The list of tests: a line for each file and each function."""
    if not names:
        yield words["none"]
    for path, group in groupby(names, lambda name: name.partition("::")[0]):
        functions = [name.partition("::")[2] for name in group]
        yield f"* `{path}`" + (":" if any(functions) else "")
        yield from (f"  `{function}`" + ("," if function != functions[-1] else "") for function in functions if function)


def plain(text: str) -> str:
    """A quotation without characters that Markdown would read as marks."""
    return text.replace("*", "\\*").replace("_", "\\_") if "`" not in text else text


def chinese_sections() -> str:
    return sections("zh")


def chinese_statements() -> str:
    return statements("zh")
