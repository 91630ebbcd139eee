"""Text files of a folder as passages: paragraphs up to a size, with file and line. Selection within a token budget."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = frozenset(".md .txt .rst .html .csv .json .toml .yaml .yml .py .c .cpp .h .js .ts .rs .go .java .sh .sql".split())
# Largest file, in bytes.
LARGEST = 2 << 20
# Most characters of a passage.
PASSAGE = 900
Count = Callable[[str], int]


@dataclass(frozen=True, slots=True, order=True)
class Passage:
    """A piece of a document: file relative to the folder, first line (from 1), text."""

    source: str
    line: int
    text: str


def read_folder(folder: Path, size: int = PASSAGE) -> list[Passage]:
    """Return the passages of all text files of a folder, in the order of their names.

    Skips hidden files, other kinds of files and files above 2 MiB. Raises ValueError if there is no text.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name one with text files")
    passages: list[Passage] = []
    for name in files(folder):
        if _is_read(folder / name):
            passages += split(name, (folder / name).read_text("utf-8", errors="replace"), size)
    if not passages:
        raise ValueError(f"{folder} has no text files (such as .md or .txt)")
    return passages


def left_out(folder: Path) -> list[str]:
    """Return the skipped files: those of other kinds, and those above 2 MiB."""
    return [name for name in files(folder) if not _is_read(folder / name)]


def not_utf8(folder: Path) -> list[str]:
    """Return the files that are not UTF-8; `read_folder` replaces their invalid bytes."""
    return [name for name in files(folder) if _is_read(folder / name) and not _is_utf8((folder / name).read_bytes())]


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def files(folder: Path) -> list[str]:
    """Return the names of a folder's files, without hidden files and links."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return [name.as_posix() for name in names if not any(part.startswith(".") for part in name.parts)]


def _is_read(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.stat().st_size <= LARGEST


def split(source: str, text: str, size: int = PASSAGE) -> list[Passage]:
    """Cut a text into passages of whole paragraphs, up to `size` characters; cuts longer paragraphs at lines, then anywhere."""
    passages: list[Passage] = []
    start, held = 1, ""
    for line, piece in _pieces(text, size):
        if held and len(held) + len(piece) + 2 > size:
            passages.append(Passage(source, start, held))
            held = ""
        start, held = (start, f"{held}\n\n{piece}") if held else (line, piece)
    if held:
        passages.append(Passage(source, start, held))
    return passages


def _pieces(text: str, size: int) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line, and the text, of each paragraph; longer ones than `size` are cut as `split` says."""
    line = 1
    for block in re.split(r"(\n[ \t]*\n\s*)", text):
        at, part = line, block.strip("\n")
        line += block.count("\n")
        while part.strip():
            cut = part if len(part) <= size else part[: part.rfind("\n", 1, size) + 1] or part[:size]
            if cut.strip():
                yield at, cut.strip("\n")
            at += cut.count("\n")
            part = part[len(cut) :]


def pack(passages: Sequence[Passage], budget: int, count: Count) -> list[Passage]:
    """Choose the best passages that fit `budget` tokens together. Returns them in the order of the documents.

    found: passages, the best first; a passage that does not fit is skipped. count: returns the tokens of a shown passage.
    The order does not depend on the question, so prompts with the same passages share their prefix in the cache.
    """
    kept: list[Passage] = []
    for passage in dict.fromkeys(passages):
        # Counts with the longest number that the passage can get.
        cost = count(shown(len(passages), passage))
        if cost <= budget:
            kept.append(passage)
            budget -= cost
    return sorted(kept)


def shown(number: int, passage: Passage) -> str:
    """Return a passage as the prompt shows it."""
    return f"[{number}] {passage.source}:{passage.line}\n{passage.text}\n\n"
