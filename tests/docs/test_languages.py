"""English and Chinese pages: the same pages and sections, one Chinese word for a term, Chinese prose in Chinese pages."""

import re
import tomllib
from collections.abc import Iterator

import pytest

from tests.docs.markdown import CHINESE, DOCS, ROOT, Page, bad, read

GLOSSARY = tomllib.loads((DOCS / "data/glossary.toml").read_text("utf-8"))["group"]
TERMS = [term for group in GLOSSARY for term in group["terms"]]
# Pages that exist in both languages, below docs/en and docs/zh.
IN_BOTH = ("index.md", "learn/*.md", "use/*.md", "understand/seeds.md")
SHARE = 0.4  # of the letters and characters of a Chinese page's prose that must be Chinese
# Marks of a page in English that a Chinese page names next to its link.
ENGLISH = "英文"


def names(language: str) -> set[str]:
    """The pages of a language that the other one has, too."""
    folder = DOCS / language
    return {page.relative_to(folder).as_posix() for pattern in IN_BOTH for page in folder.glob(pattern)}


PAIRS = [("README.md", "README.zh-CN.md"), *((f"docs/en/{name}", f"docs/zh/{name}") for name in sorted(names("en")))]
CHINESE_PAGES = [read(page) for page in [ROOT / "README.zh-CN.md", *sorted((DOCS / "zh").rglob("*.md"))]]


def test_both_languages_have_the_same_pages() -> None:
    assert names("zh") == names("en")


def shape(page: Page) -> list[int]:
    """The levels of the headings."""
    return [level for level, _ in page.headings]


def differences(english: Page, chinese: Page) -> Iterator[str]:
    """What one page has and its twin lacks."""
    if shape(english) != shape(chinese):
        yield f"{chinese.name}: headings of levels {shape(chinese)}, in {english.name} {shape(english)}"
    marks = [set(re.findall(r'<a id="([^"]+)"|^\(([\w-]+)\)=$', page.text, re.MULTILINE)) for page in (english, chinese)]
    if marks[0] != marks[1]:
        yield f"{chinese.name}: anchors differ from {english.name}: {marks[0] ^ marks[1]}"
    files = [sum(language in ("toml", "ini", "yaml") for language, _ in page.blocks) for page in (english, chinese)]
    if files[0] != files[1]:
        yield f"{chinese.name}: {files[1]} files in toml, ini or yaml, in {english.name} {files[0]}"


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda name: name)
def test_a_page_exists_in_both_languages_by_the_same_rules(english: str, chinese: str) -> None:
    page = read(ROOT / chinese)
    assert [*differences(read(ROOT / english), page), *faults(page)] == []


def wrong_terms(page: Page) -> Iterator[str]:
    """Rejected words, and the other direction: an English term in Chinese prose that is not next to its Chinese word."""
    text = "\n".join(line for _, line in page.prose)
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|“[^”]*”|\"[^\"]*\"", " ", text)
    for term in TERMS:
        for word in term.get("not", ()):
            if word in plain:
                yield f"{page.name}: {word}: write {term['zh']} for {term['en']}"
        # A single English word may be the subject of a page, or an option; a term of several words is prose.
        if (
            " " in term["en"]
            and re.search(rf"(?<![\w-]){re.escape(term['en'])}s?(?![\w-])", plain, re.IGNORECASE)
            and term["zh"] not in plain
        ):
            yield f"{page.name}: {term['en']} without {term['zh']}"


def prose_share(page: Page) -> float:
    """Share of Chinese characters among Chinese characters and English words of the prose, code and tables left out."""
    lines = [line for _, line in page.prose if not line.lstrip().startswith("|")]
    plain = re.sub(r"`[^`]*`|\]\([^)]*\)|<[^>]*>|https?://\S+", " ", "\n".join(lines))
    chinese, words = len(CHINESE.findall(plain)), len(re.findall(r"[A-Za-z][\w.-]*", plain))
    return chinese / max(1, chinese + words)


def unmarked(page: Page) -> Iterator[str]:
    """Links from a Chinese page to an English one on a line that does not say so."""
    for number, line in page.prose:
        leads = re.search(r"\]\((?:[^)]*/)?(?:en|log)/[^)]*\.md|\]\(CONTRIBUTING\.md", line)
        here = page.name == "docs/zh/index.md" and "[English](../en/index.md)" in line
        if leads and not here and ENGLISH not in section_of(page, number):
            yield f"{page.name}:{number}: a link to an English page without （{ENGLISH}）"


def section_of(page: Page, number: int) -> str:
    """The lines of the section around a line, up to it and one more: a note may stand above a list or after a link."""
    lines = page.text.splitlines()
    start = max((index for index in range(number) if lines[index].startswith("#")), default=0)
    return "\n".join(lines[start : number + 1])


def split_marks(page: Page) -> Iterator[str]:
    """Lines that begin with a mark that belongs to the end of the line before."""
    for number, line in page.prose:
        if re.match(r"\s*[、，。；：！？）》”]", line):
            yield f"{page.name}:{number}: a line begins with {line.lstrip()[0]}"


def faults(page: Page) -> list[str]:
    found = [*wrong_terms(page), *unmarked(page), *split_marks(page)]
    if (share := prose_share(page)) < SHARE:
        found.append(f"{page.name}: {share:.0%} of the prose is Chinese, at least {SHARE:.0%}")
    return found


@pytest.mark.parametrize(
    "page", [page for page in CHINESE_PAGES if page.name not in dict(PAIRS).values()], ids=lambda page: page.name
)
def test_a_chinese_page_without_a_twin_is_chinese_and_uses_the_terms(page: Page) -> None:
    assert faults(page) == []


def test_bad_pages_are_rejected() -> None:
    found = faults(bad("chinese.md", "docs/zh/use/bad.md"))
    for part in ("投机解码: write 推测解码", "beam search without 束搜索", "without （英文）", "a line begins with ，"):
        assert [one for one in found if part in one], part
    assert [one for one in faults(bad("english.md", "docs/zh/use/bad.md")) if "of the prose is Chinese" in one]
    twin = bad("chinese.md", "docs/zh/use/bad.md")
    assert [one for one in differences(bad("links.md", "docs/en/use/bad.md"), twin) if "headings of levels" in one]
