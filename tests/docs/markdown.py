"""Markdown pages, split into what the checks of the documentation look at."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BAD = Path(__file__).parent / "bad"
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LINK = re.compile(r"\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)")
FENCE = re.compile(r"^ *(```|~~~)(\w*)")
# Pages outside of docs that readers see.
OUTSIDE = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md")


@dataclass(frozen=True)
class Page:
    """A page. name: its path below the repository."""

    name: str
    text: str

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @cached_property
    def lines(self) -> list[tuple[int, str, str | None]]:
        """(line number, line, language of the fenced block or None outside of fences); the marks of a fence are left out."""
        found, fence = [], None
        for number, line in enumerate(self.text.splitlines(), 1):
            mark = FENCE.match(line)
            if mark:
                fence = mark[2] if fence is None else None
            else:
                found.append((number, line, fence))
        return found

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Lines outside of fenced blocks, with their numbers."""
        return [(number, line) for number, line, fence in self.lines if fence is None]

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """(language, text) of each fenced block."""
        return [
            (found[2], found[3])
            for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", self.text, re.DOTALL | re.MULTILINE)
        ]

    @cached_property
    def headings(self) -> list[tuple[int, str]]:
        """(level, text) of each heading."""
        return [(len(found[1]), found[2]) for _, line in self.prose if (found := re.match(r"(#+) (.*)", line))]

    @cached_property
    def anchors(self) -> set[str]:
        """Anchors of the headings and those written in HTML or MyST."""
        seen: dict[str, int] = {}
        found = set(re.findall(r'<a (?:id|name)="([^"]+)"|^\(([\w-]+)\)=$', self.text, re.MULTILINE))
        named = {one for pair in found for one in pair if one}
        for _, text in self.headings:
            anchor = slug(text)
            count = seen.get(anchor, 0)
            named.add(anchor if count == 0 else f"{anchor}-{count}")
            seen[anchor] = count + 1
        return named

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and pictures outside of code."""
        return [target for _, line in self.prose for target in LINK.findall(re.sub(r"`[^`]*`", "``", line))]

    @cached_property
    def cells(self) -> list[tuple[int, str]]:
        """Cells of tables, with line numbers."""
        rule = re.compile(r"[ |:-]+$")
        rows = [(number, line) for number, line in self.prose if line.lstrip().startswith("|") and not rule.match(line)]
        return [(number, cell.strip()) for number, row in rows for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))]

    def sentences(self) -> Iterator[tuple[int, str]]:
        """Sentences of paragraphs and list entries. Code is one word, tables and headings are left out."""
        paragraph: list[str] = []
        first = 0
        for number, line in [*self.prose, (0, "")]:
            starts = re.match(r" *(?:[*-]|\d+\.) ", line)
            if not line.strip() or starts or line.lstrip().startswith(("|", "#", "<!--", "$$")):
                yield from ((first, sentence) for sentence in split_sentences(" ".join(paragraph)))
                paragraph = []
            if line.strip() and not line.lstrip().startswith(("|", "#", "<!--", "$$")):
                first = first if paragraph else number
                paragraph.append(re.sub(r"^ *(?:[*-]|\d+\.) ", "", line).strip())

    @property
    def is_chinese(self) -> bool:
        return self.name.startswith("docs/zh/") or self.name == "README.zh-CN.md"


def split_sentences(text: str) -> list[str]:
    """Sentences of a paragraph. Code, links and numbers do not end one."""
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"\$[^$]+\$", "FORMULA", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return [part.strip() for part in re.split(r"(?<=[.!?:;。！？；])\s+|(?<=[。！？；])", text) if part.strip()]


def slug(heading: str) -> str:
    """The anchor of a heading, as code hosts and the site make it."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def read(path: Path, name: str | None = None) -> Page:
    return Page(name or path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))


def bad(name: str, as_name: str) -> Page:
    """A page that a check must reject, read as if it were the page `as_name`."""
    return read(BAD / name, as_name)


def pages() -> list[Page]:
    """All pages that readers see, in order."""
    return [read(path) for path in [*(ROOT / name for name in OUTSIDE), *sorted(DOCS.rglob("*.md"))]]
