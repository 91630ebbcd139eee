"""Links of the pages lead to files and anchors that exist, and the start pages list every page."""

from collections.abc import Iterator

import pytest

from tests.docs.markdown import DOCS, ROOT, Page, bad, pages, read

PAGES = {page.name: page for page in [*pages(), read(ROOT / "CHANGELOG.md")]}


def dead(page: Page) -> Iterator[str]:
    """Links of a page that lead nowhere."""
    for link in page.links:
        path, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.path.parent / path).resolve() if path else page.path
        if path and not target.exists():
            yield f"{page.name}: {link}: no such file"
        elif anchor and target.suffix == ".md":
            other = page if target == page.path else PAGES.get(target.relative_to(ROOT).as_posix())
            if other is None or anchor not in other.anchors:
                yield f"{page.name}: {link}: no such heading"


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name: str) -> None:
    assert list(dead(PAGES[name])) == []


def test_a_page_with_dead_links_is_rejected() -> None:
    found = list(dead(bad("links.md", "docs/en/use/links.md")))
    assert [one.rpartition(": ")[2] for one in found] == ["no such file", "no such heading", "no such heading"]


def unlisted(language: str, start: Page) -> set[str]:
    """Pages of a language that its start page does not link."""
    folder = DOCS / language
    linked = {(folder / link.partition("#")[0]).resolve() for link in start.links}
    return {page.relative_to(DOCS).as_posix() for page in folder.rglob("*.md") if page != folder / "index.md"} - {
        page.relative_to(DOCS).as_posix() for page in linked if page.is_relative_to(DOCS)
    }


@pytest.mark.parametrize("language", ["en", "zh", "log"])
def test_the_start_page_links_every_page(language: str) -> None:
    assert unlisted(language, PAGES[f"docs/{language}/index.md"]) == set()


def test_a_start_page_without_a_page_is_rejected() -> None:
    assert "en/reference/commands.md" in unlisted("en", bad("links.md", "docs/en/index.md"))
