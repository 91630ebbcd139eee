"""An answer's Markdown as HTML that is safe whatever the model wrote.

Three locks: the parser writes HTML in the text as text and makes no images, the result is reduced to a short list of tags and
attributes (formulas twice), and the page's Content-Security-Policy runs nothing inline and fetches nothing from elsewhere.
"""

import contextlib
from contextvars import ContextVar
from html import escape

import nh3
from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.styles import get_style_by_name
from pygments.token import STANDARD_TYPES

from headrace.confined.pool import BusyError, OverrunError, Task, shared_pool
from headrace.server.page import formulas

MAX_TEXT = 100_000  # characters; the page shows longer answers as plain text
MAX_CODE = 10_000  # characters of code with colours in one text
# Languages with colours, and their other names. A lexer is a set of regular expressions that cannot be interrupted: these were
# tested with hostile texts, and none of their matches takes long. Those of C and Java do.
LANGUAGES = {
    name: language
    for language, names in {
        "python": "python py", "javascript": "javascript js", "typescript": "typescript ts", "bash": "bash sh shell",
        "json": "json", "go": "go golang", "rust": "rust rs", "html": "html", "css": "css", "sql": "sql", "yaml": "yaml yml",
        "diff": "diff", "kotlin": "kotlin", "lua": "lua", "php": "php", "ruby": "ruby rb", "toml": "toml",
    }.items()
    for name in names.split()
}  # fmt: skip
NESTING = 20

TAGS = set(
    "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre s span strong table tbody td th thead tr ul div".split()
)
ATTRIBUTES = {"a": {"href", "title"}, "code": {"class"}, "span": {"class"}, "ol": {"start"}}
ATTRIBUTES |= dict.fromkeys(formulas.TAGS, formulas.ATTRIBUTES)
SCHEMES = {"http", "https", "mailto"}
LIGHT, DARK = "xcode", "github-dark"
COLOUR = Task(__name__, "render", answer=32 << 20)


_code_left = ContextVar("_code_left", default=0)  # characters of the current text that may still get colours


def _colour(code: str, language: str, _: str) -> str:
    """Return a block of code with a span around each token, or "": the parser then escapes it."""
    known, left = LANGUAGES.get(language.lower()), _code_left.get()
    if known is None or len(code) > left:
        return ""
    _code_left.set(left - len(code))
    return str(highlight(code, get_lexer_by_name(known, stripnl=False), HtmlFormatter(nowrap=True)))


_parser = MarkdownIt("commonmark", {"html": False, "highlight": _colour, "maxNesting": NESTING, "breaks": True})
_parser.enable(["table", "strikethrough"]).disable(["image"])
formulas.add_formulas(_parser)


def render(text: str) -> str:
    """Render Markdown as safe HTML. A text longer than MAX_TEXT is only escaped."""
    if len(text) > MAX_TEXT:
        return f"<p>{escape(text)}</p>"
    _code_left.set(MAX_CODE)
    return clean(_parser.render(text))


async def render_confined(text: str) -> str:
    """`render` in a confined process. A text that exceeds its limits is only escaped. Raises BusyError."""
    try:
        return str(await shared_pool().ask(COLOUR, text))
    except OverrunError:
        return f"<p>{escape(text)}</p>"


async def start_renderer() -> None:
    """Start a confined process with the renderer, so that the first answer does not wait for its imports."""
    with contextlib.suppress(BusyError):
        await render_confined("")


def warm(_: str) -> None:
    """Load everything that `render` needs; lexers are built at their first use."""
    render("$x$\n\n| a |\n|-|\n" + "".join(f"\n```{name}\nx\n```\n" for name in set(LANGUAGES.values())))


def clean(html: str) -> str:
    """Remove all tags and attributes except those of the lists above."""
    return nh3.clean(
        html,
        tags=TAGS | formulas.TAGS,
        attributes=ATTRIBUTES,
        url_schemes=SCHEMES,
        link_rel="noopener noreferrer nofollow",
        strip_comments=True,
    )


def code_css() -> str:
    """Return a style sheet with a light and a dark colour for each kind of token."""
    light, dark = get_style_by_name(LIGHT), get_style_by_name(DARK)
    lines = []
    for token, name in STANDARD_TYPES.items():
        pair = [style.style_for_token(token)["color"] for style in (light, dark)]
        if name and all(pair):
            lines.append(f"pre .{name} {{ color: light-dark(#{pair[0]}, #{pair[1]}) }}")
    return "\n".join(lines)
