"""A model's tokenizer in a confined process: for texts so long that their cost is looked at."""

import array
import functools
from pathlib import Path

from headrace.confined.pool import OverrunError, Task, shared
from headrace.startup.opening import open_files
from headrace.text.tokenizer import Tokenizer, TokenizerError

LONG = 64 << 10  # characters that are encoded in this process, in a thread; more are not
SECONDS = 20.0  # CPU time of a request's texts


async def encode_long(path: Path, texts: list[str], add_special: bool, parse_special: bool) -> list[list[int]]:
    """Token ids of texts by the tokenizer of the model at `path`. Raises TokenizerError, BusyError."""
    task = Task(__name__, "encode", str(path.absolute()), seconds=SECONDS, memory=2 << 30, answer=64 << 20)
    try:
        found = await shared().ask(task, [task.argument, texts, add_special, parse_special])
    except OverrunError:
        raise TokenizerError("the text takes too much time or memory to be encoded; shorten it") from None
    if isinstance(found, str):
        raise TokenizerError(found)
    return [array.array("i", ids).tolist() for ids in found]


def encode(question: tuple[str, list[str], bool, bool]) -> list[bytes] | str:
    """The ids of each text as 32-bit numbers, or what is wrong with one."""
    path, texts, add_special, parse_special = question
    try:
        ids = [_tokenizer(path).encode(text, add_special, parse_special) for text in texts]
    except TokenizerError as error:
        return str(error)
    return [array.array("i", each).tobytes() for each in ids]


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    opened = open_files(path, download=False)
    try:
        return opened.tokenizer
    finally:
        opened.source.close()


def warm(path: str) -> None:
    """Read the vocabulary, of which plain text may need another form."""
    for plain in (True, False):
        encode((path, ["a"], True, plain))
