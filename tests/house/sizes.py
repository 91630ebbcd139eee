"""Size and wording of the sources: what `test_size.py` compares with `sizes.json`.

python -m tests.house.sizes                     the counts now, next to the recorded ones
python -m tests.house.sizes --lower             record the counts that fell
python -m tests.house.sizes --raise "REASON"    record all counts; the reason is kept for those that rose
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RECORD = HERE / "sizes.json"
# Phrases that make a sentence hard to read for somebody whose first language is not English, one regular expression a line.
PHRASES = re.compile("|".join((HERE / "style_phrases.txt").read_text("utf-8").splitlines()), re.IGNORECASE)
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def count_source(text: str) -> Counter[str]:
    """Tokens, classes, functions and phrases of one Python source. Comments and docstrings count for phrases alone."""
    counts: Counter[str] = Counter()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            counts["phrases in Python"] += count_phrases(token.string)
        elif token.type not in NOT_CODE:
            counts["tokens"] += 1
    for node in ast.walk(ast.parse(text)):
        counts["classes"] += isinstance(node, ast.ClassDef)
        counts["functions"] += isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if isinstance(node, DOCUMENTED):
            counts["phrases in Python"] += count_phrases(ast.get_docstring(node) or "")
    return counts


def count_phrases(text: str) -> int:
    return sum(1 for _ in PHRASES.finditer(text))


def count_all(root: Path = ROOT) -> dict[str, int]:
    """All counts of a checkout by name; tokens also by package."""
    counts: Counter[str] = Counter()
    package = root / "src" / "headrace"
    for path in sorted(package.rglob("*.py")):
        one = count_source(path.read_text("utf-8"))
        counts += one
        counts["files"] += 1
        counts[f"tokens of {package_of(path.relative_to(package))}"] += one["tokens"]
    for path in sorted((root / "csrc").rglob("*")):
        if path.suffix in (".cpp", ".h", ".inl"):
            counts["phrases in C++"] += sum(count_phrases(comment) for comment in CPP_COMMENT.findall(path.read_text("utf-8")))
    counts["phrases in docs"] = sum(count_phrases(path.read_text("utf-8")) for path in pages(root))
    return dict(sorted(counts.items()))


def package_of(path: Path) -> str:
    return path.parts[0] if len(path.parts) > 1 else "the top"


def pages(root: Path) -> Iterator[Path]:
    """The pages that people read. The log is a record and stays as it was written."""
    yield from (path for path in sorted((root / "docs").rglob("*.md")) if path.parent.name != "log")
    yield from (root / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md"))


def risen(now: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """One line for each count above the recorded one. A package without a record may have no tokens."""
    return [
        f"{name}: {value:,}, recorded {recorded.get(name, 0):,}" for name, value in now.items() if value > recorded.get(name, 0)
    ]


def load() -> dict:
    return json.loads(RECORD.read_text("utf-8"))


def main(arguments: list[str]) -> int:
    record, now = load(), count_all()
    match arguments:
        case []:
            names = sorted({*now, *record["counts"]})
            print("\n".join(f"{name:28} {now.get(name, 0):9,} {record['counts'].get(name, 0):9,}" for name in names))
            return 0
        case ["--lower"]:
            counts = {name: min(now.get(name, 0), value) for name, value in record["counts"].items()}
            record["counts"] = {name: value for name, value in counts.items() if value}
        case ["--raise", reason] if reason.strip():
            if higher := risen(now, record["counts"]):
                record["raised"].append({"reason": reason.strip(), "counts": higher})
            record["counts"] = now
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
