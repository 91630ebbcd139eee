"""Formulas in Markdown: TeX between $ $, $$ $$, \\( \\) or \\[ \\] becomes MathML with a short list of elements and
attributes."""

import re
from html import escape, unescape
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import convert_to_element
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

LONGEST = 2_000  # characters of a formula
DEEPEST = 60  # nested braces; the library recurses for each
# Elements of MathML Core, without those that contain HTML (semantics, annotations) or links.
TAGS = set(
    "math mfrac mi mn mo mover mmultiscripts mpadded mphantom mprescripts mroot mrow ms mspace msqrt mstyle msub msubsup msup "
    "mtable mtd mtext mtr munder munderover".split()
)
WORDS = set(
    "accent accentunder columnalign columnlines display displaystyle fence form mathcolor mathvariant movablelimits rowlines "
    "scriptlevel separator stretchy symmetric".split()
)
LENGTHS = set(
    "columnspacing depth height linethickness lspace mathsize maxsize minsize rowspacing rspace voffset width".split()
)
ATTRIBUTES = WORDS | LENGTHS
WORD = re.compile(r"[#a-zA-Z0-9 -]{1,40}")
LENGTH = re.compile(
    r"(-?[0-9]?(\.[0-9]{1,4})?em|[0-9]{1,2}(\.[0-9]{1,4})?(pt|px|%)|0| ){1,9}"
)  # none that leads out of its line
# Delimiters, and whether the formula stands on lines of its own. Longer delimiters come first.
MARKS = (("$$", "$$", True), ("\\[", "\\]", True), ("\\(", "\\)", False), ("$", "$", False))
ENVIRONMENTS = {"aligned": "align*", "gathered": "align*", "gather": "align*", "gather*": "align*"}


def add_formulas(parser: MarkdownIt) -> None:
    """Add formulas to a Markdown parser."""
    parser.inline.ruler.before("escape", "formula", _inline)
    parser.block.ruler.before("fence", "formula_block", _block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    for name in ("formula", "formula_block"):
        parser.add_render_rule(name, _render)


def mathml(tex: str, display: bool) -> str:
    """Convert TeX to MathML. A formula that the library cannot convert is returned as code."""
    if len(tex) > LONGEST or _depth(tex) > DEEPEST:
        return f"<code>{escape(tex)}</code>"
    for name, known in ENVIRONMENTS.items():  # names that the library does not have
        tex = tex.replace(f"{{{name}}}", f"{{{known}}}")
    try:
        return _element(convert_to_element(tex, display="block" if display else "inline"))
    except Exception:  # a text can make the library raise anything
        return f"<code>{escape(tex)}</code>"


def _depth(tex: str) -> int:
    depth = most = 0
    for letter in tex:
        depth += (letter == "{") - (letter == "}")
        most = max(most, depth)
    return max(most, tex.count("\\left"), tex.count("\\begin"))


def _element(element: Element) -> str:
    """Write an element; of an unknown one only its content. The library writes characters as references, which are resolved."""
    inner = "".join([escape(unescape(element.text or "")), *map(_element, element)])
    if element.tag not in TAGS:
        return inner
    given = [(name, value) for name, value in element.attrib.items() if _harmless(name, value)]
    written = "".join(f' {name}="{escape(value)}"' for name, value in given)
    return f"<{element.tag}{written}>{inner}</{element.tag}>"


def _harmless(name: str, value: str) -> bool:
    return bool((name in WORDS and WORD.fullmatch(value)) or (name in LENGTHS and LENGTH.fullmatch(value)))


def _inline(state: StateInline, silent: bool) -> bool:
    source, begin = state.src, state.pos
    for opening, closing, display in MARKS:
        if not source.startswith(opening, begin):
            continue
        start = begin + len(opening)
        end = _end(source, start, closing, min(state.posMax, start + LONGEST))
        if end is None or (opening == "$" and begin > 0 and source[begin - 1].isalnum()):
            return False
        if not silent:
            token = state.push("formula", "math", 0)
            token.content, token.meta = source[start:end], {"display": display}
        state.pos = end + len(closing)
        return True
    return False


def _end(source: str, start: int, closing: str, last: int) -> int | None:
    """Find the closing delimiter of a formula. A dollar sign next to a space or in front of a digit may be a price: then
    None."""
    end = source.find(closing, start, last)
    while end > start and source[end - 1] == "\\" and closing[0] == "$":
        end = source.find(closing, end + 1, last)
    inside = source[start : max(end, start)]
    if not inside.strip() or "\n\n" in inside:
        return None
    price = inside[0].isspace() or inside[-1].isspace() or source[end + 1 : end + 2].isdigit()
    return None if closing == "$" and price else end


def _block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    """Parse a formula on lines of its own, also with lines that elsewhere begin a list or a heading."""
    if state.is_code_block(first):
        return False
    begin = state.bMarks[first] + state.tShift[first]
    marks = next((pair[:2] for pair in MARKS[:2] if state.src.startswith(pair[0], begin)), None)
    if marks is None:
        return False
    text: list[str] = []
    for line in range(first, last):
        row = state.src[begin + 2 if line == first else state.bMarks[line] : state.eMarks[line]]
        body, _, rest = row.partition(marks[1])
        text.append(body)
        if body != row:
            if rest.strip() or not "".join(text).strip():
                return False
            if not silent:
                token = state.push("formula_block", "math", 0)
                token.content, token.meta, token.map = "\n".join(text).strip(), {"display": True}, [first, line + 1]
                state.line = line + 1
            return True
        if (not row.strip() and line > first) or sum(map(len, text)) > LONGEST:
            return False
    return False


def _render(renderer: Any, tokens: list[Token], place: int, *_: Any) -> str:
    token = tokens[place]
    html = mathml(token.content, token.meta["display"])
    return f"<p>{html}</p>\n" if token.type == "formula_block" else html
