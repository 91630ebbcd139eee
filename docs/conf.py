"""Configuration of the documentation site: `make docs` builds it from these Markdown pages, without a network.

Navigation follows the links of en/index.md and zh/index.md. Formulas become MathML. No page loads anything from another host.
"""

import re
from collections.abc import Iterator
from gettext import translation
from itertools import pairwise
from pathlib import Path
from posixpath import normpath
from typing import Any

from bs4 import BeautifulSoup
from docutils import nodes
from latex2mathml.converter import convert
from sphinx import package_dir
from sphinx.search.en import SearchEnglish

HERE = Path(__file__).parent
DOORS = {
    "en": {"learn": "Learn", "use": "Use", "reference": "Reference", "understand": "Understand"},
    "zh": {"learn": "学", "use": "用", "reference": "查", "understand": "懂"},
}

LOG = "Log"
WIDE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef（）“”]"

project = "Headrace"
language = "en"  # `set_language` sets that of Chinese pages
copyright = "the Headrace authors"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
exclude_patterns = ["data"]
# Pages shorten JSON with "…".
suppress_warnings = ["misc.highlighting_failure"]
smartquotes = False
html_theme = "furo"
html_title = "Headrace"
html_search_language = "en-zh"  # the class Search
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
CHINESE_SEARCH = "zh/search"
CHINESE_SCRIPT = Path(package_dir, "locale/zh_CN/LC_MESSAGES/sphinx.js")
html_static_path = ["static", str(CHINESE_SCRIPT)]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}


def linked(language: str) -> list[str]:
    """Pages that the start page of a language links, in its order."""
    start = (HERE / language / "index.md").read_text("utf-8")
    return [f"{language}/{name}" for name in dict.fromkeys(re.findall(r"\]\(([\w/-]+)\.md[)#]", start))]


def navigation() -> str:
    """Table of contents of the site: the pages of each language by door, then the log."""
    parts = [contents("", [f"{language}/index" for language in DOORS])]
    names = {page.relative_to(HERE).with_suffix("").as_posix() for page in HERE.rglob("*.md")}
    for language, doors in DOORS.items():
        order = [name for name in linked(language) if name in names]
        order += sorted(names - set(order))
        for folder, title in doors.items():
            parts.append(contents(title, [name for name in order if name.startswith(f"{language}/{folder}/")]))
    months = sorted((name for name in names if re.match(r"log/\d", name)), reverse=True)
    others = sorted(name for name in names if name.startswith("log/") and name not in months)
    parts.append(contents(LOG, [*others, *months]))
    return "\n".join(parts)


def contents(title: str, pages: list[str]) -> str:
    caption = f":caption: {title}\n" if title else ""
    return "\n```{toctree}\n:hidden:\n" + caption + "\n".join(pages) + "\n```\n" if pages else ""


def prepare(app: Any, page: str, source: list[str]) -> None:
    """Add the navigation to the start page, and remove links to Markdown files outside of docs, which the site lacks."""
    folder = (HERE / page).parent
    source[0] = re.sub(
        r"\[([^\]]+)\]\(([^):#]+\.md)[^)]*\)",
        lambda link: link[0] if (folder / link[2]).resolve().is_relative_to(HERE) else link[1],
        source[0],
    )
    if language_of(page) == "zh":
        source[0] = joined(source[0])
    if page == "index":
        source[0] += navigation()


def joined(text: str) -> str:
    """Chinese text without its line breaks, which browsers show as spaces. Code and tables keep theirs."""
    parts = re.split(r"(^```.*?^```)", text, flags=re.DOTALL | re.MULTILINE)
    # Full-width punctuation needs no space next to Latin letters or code; lists, quotes and tables keep their lines.
    broken = re.compile(rf"(?<={WIDE})\n *(?={WIDE})|(?<=[，。；：、（])\n *(?=[`\[A-Za-z])|(?<=[\w`)\]])\n *(?=[（“])")
    return "".join(part if part.startswith("```") else broken.sub("", part) for part in parts)


def language_of(page: str) -> str:
    return "zh" if page.startswith("zh/") else "en"


def set_language(app: Any, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    """Show the navigation and the words of the theme in the language of the page."""
    language = language_of(page)
    menu = BeautifulSoup(context.get("furo_navigation_tree", ""), "html.parser")
    hidden = {title for name, doors in DOORS.items() if name != language for title in doors.values()}
    for caption in menu.select("p.caption"):
        if caption.get_text(strip=True) in hidden:
            listed = caption.find_next_sibling("ul")
            if listed is not None:
                listed.decompose()
            caption.decompose()
        elif language == "zh" and caption.get_text(strip=True) == LOG:
            caption.string = "记录（英文）"
    context["furo_navigation_tree"] = str(menu)
    for way in ("prev", "next"):
        if (other := context.get(way)) and language_of(normpath(f"{page}/../{other['link']}")) != language:
            context[way] = None
    context["language"] = "zh-CN" if language == "zh" else "en"
    if language == "zh":
        context["gettext"] = context["_"] = in_chinese
        path = context["pathto"]
        context["pathto"] = lambda name, *more, **options: path(CHINESE_SEARCH if name == "search" else name, *more, **options)
        if page == CHINESE_SEARCH:
            app.add_js_file(CHINESE_SCRIPT.name)


def chinese_search(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The search page of the Chinese pages: same index, Chinese words."""
    yield CHINESE_SEARCH, {}, "search.html"


def replace_fixed_words(app: Any, error: Exception | None) -> None:
    """Translate words that the theme's templates do not mark for translation, in the written Chinese pages."""
    for page in Path(app.outdir, "zh").rglob("*.html"):
        text = page.read_text("utf-8")
        page.write_text(FIXED_WORD.sub(lambda found: f"{found[1]}{FIXED[found[2]]}{found[3]}", text), "utf-8")


# `sphinx.locale.init` would set these texts for the pages of every language.
CHINESE = translation("sphinx", Path(package_dir, "locale"), ["zh_CN"])
# Texts of the theme that Sphinx does not translate.
THEME = {
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "On this page": "本页目录",
    "Back to top": "回到顶部",
    "Skip to content": "跳到正文",
    "Made with ": "制作工具：",
}
# Texts of the theme that are in its templates without a mark for translation.
FIXED = {
    "Contents": "目录",
    "Menu": "菜单",
    "Expand": "展开",
    "Light mode": "浅色",
    "Dark mode": "深色",
    "Auto light/dark, in light mode": "跟随系统，现为浅色",
    "Auto light/dark, in dark mode": "跟随系统，现为深色",
    "Toggle site navigation sidebar": "显示或隐藏导航",
    "Toggle table of contents sidebar": "显示或隐藏本页目录",
    "Toggle Light / Dark / Auto color theme": "切换浅色、深色、跟随系统",
    "Link to this heading": "本节链接",
}
FIXED_WORD = re.compile(f'(<title>|aria-label="|title=")({"|".join(map(re.escape, FIXED))})(</title>|")')


def in_chinese(text: str) -> str:
    return THEME.get(text) or CHINESE.gettext(text)


class Search(SearchEnglish):
    """Search index of both languages: English words by their stem, Chinese text as pairs of characters."""

    lang = "en-zh"
    js_splitter_code = r"""
var splitQuery = (query) =>
  (query.match(/[\u4e00-\u9fff]+|(?:(?![\u4e00-\u9fff])[\p{Letter}\p{Number}_])+/gu) || []).flatMap((word) =>
    /^[\u4e00-\u9fff]{2}/.test(word) ? [...word.slice(1)].map((next, index) => word[index] + next) : [word],
  );
"""

    def split(self, text: str) -> list[str]:
        words = re.findall(r"[\u4e00-\u9fff]+|[^\W\u4e00-\u9fff]+", text)
        return [part for word in words for part in pairs(word)]


def pairs(word: str) -> list[str]:
    """The pairs of neighbouring characters of a run of Chinese characters; any other word alone."""
    return [a + b for a, b in pairwise(word)] if re.match("[\u4e00-\u9fff]{2}", word) else [word]


def visit_math(self: Any, node: nodes.math) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_search_language(Search)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.connect("source-read", prepare)
    app.connect("html-page-context", set_language, priority=900)
    app.connect("html-collect-pages", chinese_search)
    app.connect("build-finished", replace_fixed_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
