"""The site builds offline without a warning, and its pages load nothing from another host."""

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from bs4.element import NavigableString

from tests.docs.markdown import BAD, CHINESE, DOCS

# Markup and code that load a resource by an absolute address. Links (<a href>) load nothing.
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed|object)\b[^>]*?(?:src|data)=["'](?:https?:)?//"""
    r"""|<link\b(?![^>]*rel=["'](?:canonical|author|license))[^>]*?href=["'](?:https?:)?//"""
    r"""|@import\s+(?:url\()?["']?(?:https?:)?//|url\(\s*["']?(?:https?:)?//"""
    r"""|(?:fetch|import|importScripts|\.open|\.src\s*=)\s*\(?\s*["'](?:https?:)?//""",
    re.IGNORECASE,
)


# Pages whose HTML `make test` looks at; `make test-slow` writes and reads that of all pages.
SOME = ("index", "en/index", "zh/index", "en/learn/01-first-answer", "zh/learn/01-first-answer", "en/reference/http")


def build(source: Path, out: Path, builder: str = "html", pages: Iterable[Path] = ()) -> subprocess.CompletedProcess[str]:
    # Sphinx warns that the search index of some pages is incomplete.
    strict = [] if pages else ["-W", "--keep-going", "-n"]
    options = [*strict, "-q", "-b", builder, "-d", str(out.with_name("doctrees"))]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(out), *map(str, pages)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def built(folder: Path, builder: str = "html", pages: Iterable[Path] = ()) -> Path:
    done = build(DOCS, folder / builder, builder, pages)
    assert done.returncode == 0, done.stderr
    assert pages or done.stderr == ""
    return folder / builder


@pytest.fixture(scope="module", params=[pytest.param(True, id="some"), pytest.param(False, id="all", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The HTML of some pages, after the links of all were resolved; or that of all pages."""
    folder = tmp_path_factory.mktemp("site")
    if not request.param:
        return built(folder)
    built(folder, "dummy")
    return built(folder, pages=[DOCS / f"{name}.md" for name in SOME])


def outside_loads(folder: Path) -> list[str]:
    """Files that load something from another host, with what they load."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css", ".js")]
    return [f"{path.name}: {found[0]}" for path in files for found in LOADS.finditer(path.read_text("utf-8"))]


def test_every_page_is_built(site: Path, request: pytest.FixtureRequest) -> None:
    names = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    every = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert (every if "all" in request.node.name else set(SOME)) <= names


def test_no_page_loads_from_another_host(site: Path) -> None:
    assert outside_loads(site) == []
    (site / "bad.html").write_text('<link rel="stylesheet" href="https://fonts.example/a.css"><a href="https://arxiv.org/">')
    (site / "bad.css").write_text("@import url('//fonts.example/b.css');")
    assert [one.split(":")[0] for one in outside_loads(site)] == ["bad.css", "bad.html"]


def test_pages_are_in_the_language_of_their_folder(site: Path) -> None:
    english, chinese = ((site / name / "index.html").read_text("utf-8") for name in ("en", "zh"))
    assert ('lang="en"' in english, 'lang="zh-CN"' in chinese) == (True, True)
    assert (">Use<" in english, ">Use<" in chinese) == (True, False)
    for name, texts, others in (("en", ("Search", "Next"), ("搜索", "下一页")), ("zh", ("搜索", "下一页"), ("Search", "Next"))):
        pages = "".join(page.read_text("utf-8") for page in (site / name).rglob("*.html"))
        assert (f'placeholder="{texts[0]}"' in pages, f"<span>{texts[1]}</span>" in pages) == (True, True)
        assert (f'placeholder="{others[0]}"' in pages, f"<span>{others[1]}</span>" in pages) == (False, False)


def test_line_breaks_leave_no_space_next_to_full_width_marks() -> None:
    joined = runpy.run_path(str(DOCS / "conf.py"))["joined"]
    assert joined("装得下\n吗，\n`fit` 读 torch\n（几 GB），\nLLM") == "装得下吗，`fit` 读 torch（几 GB），LLM"
    lists = "写法：\n* 名字\n1. 路径\n> 引文\n| 表 |\n```\n码，\nx\n```\n两个 GB\nLLM"
    assert joined(lists) == lists


NAMES = {"Headrace", "Furo", "Copyright © the Headrace authors"}


def words_of_the_theme(html: str) -> set[str]:
    """Texts, labels and hints without a Chinese character that are not of the page's own text: of the theme."""
    page = BeautifulSoup(html, "html.parser")
    hints = {str(tag[name]) for tag in page.find_all(True) for name in ("aria-label", "title", "placeholder") if tag.get(name)}
    for own in page.select("article, .sidebar-tree a, .toc-tree, script, style"):
        own.decompose()
    texts = {" ".join(text.split()) for text in page.find_all(string=True) if type(text) is NavigableString}
    return {text for text in texts | hints if re.search("[A-Za-z]", text) and not CHINESE.search(text)}


def test_chinese_pages_show_no_english_word_of_the_theme(site: Path) -> None:
    pages = sorted((site / "zh").rglob("*.html"))
    assert site / "zh/search.html" in pages
    assert set().union(*(words_of_the_theme(page.read_text("utf-8")) for page in pages)) - NAMES == set()
    assert {"Back to top", "Menu", "Log", "Toggle Light / Dark / Auto color theme"} <= words_of_the_theme(
        (site / "en/index.html").read_text("utf-8")
    )


def test_the_search_finds_chinese_words(site: Path) -> None:
    """Words of two characters inside of a sentence are in the index; the page's script splits a query by the same rule."""
    index = json.loads((site / "searchindex.js").read_text("utf-8").removeprefix("Search.setIndex(").removesuffix(")"))
    assert {"词元", "草稿", "密钥", "token"} <= index["terms"].keys()
    assert "[...word.slice(1)].map" in (site / "_static/language_data.js").read_text("utf-8")
    assert 'action="../search.html"' in (site / "en/learn/01-first-answer.html").read_text("utf-8").replace("../../", "../")
    assert 'action="../search.html"' in (site / "zh/learn/01-first-answer.html").read_text("utf-8")


def test_a_page_with_a_dead_anchor_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    for name in ("conf.py", "static"):
        copy = shutil.copytree if (DOCS / name).is_dir() else shutil.copy
        copy(DOCS / name, source.mkdir(exist_ok=True) or source / name)  # type: ignore[operator]
    for name in ("index.md", "en/index.md", "zh/index.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"# {name}\n")
    (source / "en/use").mkdir()
    shutil.copy(BAD / "links.md", source / "en/use/links.md")
    done = build(source, tmp_path / "out")
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr
