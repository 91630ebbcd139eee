"""Calibration and evaluation texts: drawn from a file, or written by the model."""

import hashlib
import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.weights import packed_bytes
from headrace.compress.grids.arithmetic import kv_token_bytes
from headrace.compress.pipeline import SELF
from headrace.compress.work_folder import WorkFolder
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.models.registry import describe
from headrace.startup.opening import Opened

WINDOW = 256  # tokens of a text
SHARED = 32  # tokens of a passage; calibration and evaluation texts may not share one
BATCH = 16  # texts that the model writes at a time
PIECE = 1 << 20  # least characters of a file that are encoded at a time; at most twice as many
ENCODING = 140  # bytes of memory for each character during encoding

Texts = list[list[int]]


def draw_texts(
    opened: Opened,
    source: str,
    tokens: int,
    seed: int,
    progress: Progress,
    window: int = WINDOW,
    threads: int = 0,
    judging: bool = False,
) -> Texts:
    """Draw texts of `window` tokens, `tokens` tokens together or fewer if the file ends, from a file or (source "self") from
    the model. For an encoder each line of the file is a text, cut to `window` tokens.

    judging: draw evaluation texts, which differ from calibration texts if the source has enough. Raises ValueError if the file
    has less than one text, and OSError.
    """
    window = min(window, opened.config.max_position)
    count = -(-tokens // window)
    if source == SELF:
        return _own(opened, count, 2 * seed + judging, progress, window, threads or None)
    path = Path(source)
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    if opened.config.encoder:
        return _lines(opened, path, text, tokens, seed, window, judging)
    start = start_tokens(opened)
    file_tokens, length = _encoded(opened, text), window - len(start)
    starts = list(range(0, len(file_tokens) - length + 1, length))
    if not starts:
        raise ValueError(f"{path} has {len(file_tokens):,} tokens and a text needs {length:,}; give a longer one")
    random.Random(seed).shuffle(starts)
    return [[*start, *file_tokens[at : at + length]] for at in (starts[-count:] if judging else starts[:count])]


def _lines(opened: Opened, path: Path, text: str, tokens: int, seed: int, window: int, judging: bool) -> Texts:
    """Draw lines of a file, from one end of a shuffled order to calibrate and from the other to judge."""
    lines = list(dict.fromkeys(line for line in text.splitlines() if line.strip()))
    if len(lines) < 2:
        raise ValueError(f"{path} has {len(lines)} lines and an encoder reads a text on each; give more")
    random.Random(seed).shuffle(lines)
    texts: Texts = []
    for line in reversed(lines) if judging else lines:
        if sum(map(len, texts)) >= tokens:
            break
        texts.append(opened.tokenizer.encode(line, parse_special=False)[:window])
    return texts


def _encoded(opened: Opened, text: str) -> "array[int]":
    """Tokens of a text, encoded in pieces that end at a line if possible. Names of control tokens are plain text."""
    tokens, start = array("I"), 0
    while start < len(text):
        end = len(text)
        if end - start > 2 * PIECE:
            end = text.find("\n", start + PIECE, start + 2 * PIECE) + 1 or start + 2 * PIECE
        tokens.extend(opened.tokenizer.encode(text[start:end], add_special=False, parse_special=False))
        start = end
    return tokens


def file_bytes(path: Path) -> int:
    """Peak memory of reading texts from a file in bytes: the file, its tokens, and the tokenizer's work on a piece."""
    size = path.stat().st_size if path.is_file() else 0
    return 4 * size + ENCODING * min(size, 2 * PIECE)


def start_tokens(opened: Opened) -> list[int]:
    """Tokens at the start of every text: BOS, or none."""
    return [token for token in opened.tokenizer.encode("")[:1] if token == opened.tokenizer.bos_id]


def _own(opened: Opened, count: int, seed: int, progress: Progress, window: int, threads: int | None) -> Texts:
    """Texts that the model writes at temperature 1 from BOS (or EOS, if it has no BOS).

    Any change of the model can only make them less likely.
    """
    first = start_tokens(opened) or sorted(opened.eos_ids)[:1] or [0]
    settings: dict[str, Any] = {"max_model_len": window, "max_num_seqs": BATCH, "threads": threads}
    texts: Texts = []
    with LLM(opened.path, speculate=None, enable_prefix_caching=False, **settings) as llm:
        progress.start("texts of the model's own", count, unit="texts")
        for at in range(0, count, BATCH):
            params = [
                SamplingParams(temperature=1.0, max_tokens=window - len(first), seed=(seed << 20) + number, ignore_eos=True)
                for number in range(at, min(at + BATCH, count))
            ]
            outputs = llm.generate([first] * len(params), params)
            if failed := next((output.error for output in outputs if output.error), None):
                raise RuntimeError(f"a text to measure on failed: {failed}")
            texts += [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs]
            progress.advance(len(params))
        progress.finish()
    return texts


def writing_bytes(opened: Opened, window: int) -> int:
    """Memory of a model that writes texts in bytes: packed weights, and K and V of a batch."""
    model = describe(opened.config)
    weights = packed_bytes(model, opened.source) if core.available() else 2 * model.num_parameters
    return weights + round(BATCH * window * kv_token_bytes(opened.config, "bfloat16"))


def save_texts(work: WorkFolder, name: str, texts: Texts) -> None:
    """Write texts into a file of the work folder."""
    work.write(name, {"texts": texts, "sha256": _digest(texts)})


def load_texts(work: WorkFolder, name: str) -> Texts:
    """Read texts that `save_texts` wrote. Raises WeightError if the file is damaged."""
    record = work.read(name)
    texts: Texts = record.get("texts", [])
    if not texts or record.get("sha256") != _digest(texts):
        raise work.damaged(name)
    return texts


def _digest(texts: Texts) -> str:
    """SHA-256 of the tokens."""
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


def passage_hashes(texts: Sequence[Sequence[int]]) -> list[str]:
    """Hash of each passage of SHARED tokens, or of a shorter text. A report keeps them to identify its calibration texts."""
    return [_hash(text[at : at + SHARED]) for text in texts for at in range(0, max(1, len(text) - SHARED + 1), SHARED)]


def _hash(tokens: Sequence[int]) -> str:
    return hashlib.sha256(np.array(tokens, "<u4").tobytes()).hexdigest()[:16]


def check_apart(measured: Sequence[str], judged: Sequence[Sequence[int]], whose: str = "") -> None:
    """Raise ValueError if an evaluation text holds a calibration passage at any offset.

    measured: passage hashes. whose: the model calibrated on them, if there are several.
    """
    calibrated = set(measured)
    shared = {
        passage
        for text in judged
        for at in range(max(1, len(text) - SHARED + 1))
        if calibrated and (passage := _hash(text[at : at + SHARED])) in calibrated
    }
    if shared:
        on = f"{whose} was measured on" if whose else "were measured on"
        raise ValueError(
            f"the text to judge by has {len(shared):,} passages of {SHARED} tokens that {on}, where a model looks better; "
            "give another text"
        )
