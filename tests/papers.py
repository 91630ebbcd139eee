"""The page of papers, made from docs/data/papers.toml."""

from collections.abc import Iterator
from typing import Any

from tests.seeds import load
from tests.wrapping import wrapped

LOG = "../../log/2026-11.md"


def papers() -> list[dict[str, Any]]:
    """The rows of the data file."""
    rows: list[dict[str, Any]] = load("papers.toml")["paper"]
    return rows


def text() -> str:
    """A section for each paper: its figure, ours with the command, and why they differ."""
    return "\n\n".join("\n".join(section(row)) for row in papers())


def section(row: dict[str, Any]) -> Iterator[str]:
    """Lines of one paper."""
    yield f"## {row['paper']}"
    yield ""
    link = f"[arXiv {row['arxiv']}](https://arxiv.org/abs/{row['arxiv']})" if "arxiv" in row else f"[source]({row['url']})"
    entries = [f"Paper: {row['claim']} ({link})."]
    if row["ours"]:
        entries.append(
            f"Here: **{row['ours']}** ({row['setup']}; {row['machine']}; [log]({LOG}), {row['section'].split(':')[0]})."
        )
    else:
        entries.append(f"Here: **not measured** ([log]({LOG}), {row['section'].split(':')[0]}: what was tried).")
    entries.append(f"{row['why']} [Method](methods/{row['page']}.md).")
    for entry in entries:
        first, *rest = wrapped(entry, 98)
        yield f"* {first}"
        yield from (f"  {line}" for line in rest)
    if row["command"]:
        yield "* Command:" if len(row["command"]) > 90 else f"* `{row['command']}`"
        if len(row["command"]) > 90:
            words, line = row["command"].split(), ""
            yield from ("", "  ```bash")
            for word in words:
                if len(line) + len(word) > 86:
                    yield f"  {line} \\"
                    line = "  "
                line = f"{line} {word}" if line.strip() else line + word
            yield f"  {line}"
            yield "  ```"
