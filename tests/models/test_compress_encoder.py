"""Compression of encoders: folders with rounded matrices, judged by the embeddings, next to their controls."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.compress.containers.folder import FolderPlan
from headrace.compress.judge import EmbeddingJudgement, compare_embeddings
from headrace.compress.pipeline import Pipeline
from headrace.compress.report import Report
from headrace.compress.texts import check_apart, draw_texts, passage_hashes
from headrace.compress.write import compress, predict
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.startup.opening import open_files, open_model
from headrace.weights.loader import load_model
from tests.cli_shell import Shell
from tests.tiny_bert import write_tiny_bert

WORDS = "the mill stands by a river wheel water turn".split()
TABLE = "word_embeddings"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_bert(tmp_path_factory.mktemp("encoder") / "bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    return folder


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("texts") / "lines.txt", 1)


def write_lines(path: Path, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    path.write_text("\n".join(" ".join(rng.choice(WORDS, rng.integers(6, 14))) for _ in range(300)))
    return path


def judged(report: Report) -> EmbeddingJudgement:
    assert isinstance(report.judged, EmbeddingJudgement)
    return report.judged


def made(model: Path, lines: Path, out: Path, **settings: Any) -> Report:
    return compress(model, out, Pipeline(threads=1, judge=str(lines), **settings))


def test_fewer_bits_keep_fewer_of_the_embeddings(model: Path, lines: Path, tmp_path: Path) -> None:
    """Embeddings of OUT are those of the original with the weights that OUT stores; 8 bits are closer than 4, 4 than 3."""
    cosines = {}
    for format in ("int8", "int4-g32", "int3-g32"):
        report = made(model, lines, tmp_path / format, format=format)
        cosines[format] = judged(report).cosine
        assert judged(report).texts > 200
        assert report.kinds[format] == 18
    assert 1 > cosines["int8"] > cosines["int4-g32"] > cosines["int3-g32"] > 0
    assert cosines["int8"] > 0.999
    opened = open_model(tmp_path / "int4-g32")
    assert (opened.pooling, opened.config.encoder) == ("first", True)
    before, after = load_model(open_model(model).source), load_model(opened.source)
    ours, theirs = dict(before.named_parameters()), dict(after.named_parameters())
    assert torch.equal(ours["tokens.weight"], theirs["tokens.weight"])
    assert not torch.equal(ours["layers.0.up.weight"], theirs["layers.0.up.weight"])


def test_the_table_of_tokens_is_rounded_on_request(model: Path, lines: Path, tmp_path: Path) -> None:
    plain, small = (made(model, lines, tmp_path / f"h{head}", format="int8", head=head) for head in (None, "int8"))
    sizes = [sum(one.nbytes for name, one in report.matrices.items() if TABLE in name) for report in (small, plain)]
    assert sizes[0] < 0.3 * sizes[1]
    assert small.kinds["int8"] == 19
    assert judged(small).cosine > 0.999


def test_gptq_keeps_more_than_its_control(model: Path, lines: Path, tmp_path: Path) -> None:
    """The control rounds to nearest with the importance of inputs, from the same texts."""
    settings = {"format": "int3-g32", "calibrate": str(write_lines(tmp_path / "texts.txt", 2)), "tokens": 1024}
    control = made(model, lines, tmp_path / "control", method=("weighted",), **settings)
    gptq = made(model, lines, tmp_path / "gptq", method=("gptq",), **settings)
    errors = [sum(one.error for one in report.outputs.values()) for report in (gptq, control)]
    assert errors[0] < 0.9 * errors[1]
    assert 1 - judged(gptq).cosine < 0.9 * (1 - judged(control).cosine)


def test_zeros_of_pruned_encoders_stay(model: Path, tmp_path: Path) -> None:
    report = compress(model, tmp_path / "out", Pipeline(threads=1, format="int8", method=("magnitude",), sparsity="0.5"))
    assert report.zeros == pytest.approx(0.5, abs=0.02)


def test_no_line_is_calibrated_on_and_judged(model: Path, lines: Path) -> None:
    """Lines shorter than a passage are compared as a whole. Control: one shared line is refused."""
    opened = open_files(model)
    read = draw_texts(opened, str(lines), 600, 0, Progress())
    other = draw_texts(opened, str(lines), 600, 0, Progress(), judging=True)
    assert all(text[0] == opened.tokenizer.encode("")[0] and len(text) < 32 for text in read)
    check_apart(passage_hashes(read), other)
    with pytest.raises(ValueError, match="the text to judge by has 1 passages"):
        check_apart(passage_hashes(read), [*other, read[3]])


def test_embeddings_are_compared_by_hand() -> None:
    """Four vectors of the plane; one is turned by 60°, so its nearest differs, and so does that of its neighbour."""
    angles = np.radians([0, 10, 90, 105])
    turned = np.radians([0, 70, 90, 105])
    before, after = (np.stack([np.cos(some), np.sin(some)], 1) for some in (angles, turned))
    result = compare_embeddings(before, after, "lines")
    assert (result.texts, result.least) == (4, pytest.approx(0.5))
    assert result.cosine == pytest.approx(3.5 / 4)
    assert result.same_nearest == pytest.approx(3 / 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": ("neurons",), "keep_neurons": 0.5}, "bert is an encoder, and neurons needs a decoder; use rtn,"),
        ({"method": ("awq",), "calibrate": "lines.txt"}, "bert is an encoder, and awq needs a decoder"),
        ({"kv": "int8"}, "bert is an encoder, and --kv needs a decoder; leave it out"),
        ({"method": ("gptq",)}, "bert is an encoder and writes no texts; give --calibrate a file with a text on each line"),
        ({"judge": "self"}, "bert is an encoder and writes no texts; give --judge a file with a text on each line"),
    ],
)
def test_settings_of_decoders_are_refused(model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        predict(model, Pipeline(format="int8", **settings), FolderPlan)


def test_the_command_reports_cosines(
    model: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shell = Shell(tmp_path, monkeypatch, capsys)
    code, out, err = shell("compress", model, "-o", tmp_path / "out", "-f", "int8", "--judge", lines, "--threads", 1)
    assert (code, "K and V" in out, "quantised already" in err) == (0, False, False)
    assert re.search(r"judged: +cosine with the original's embeddings 0\.99\d\d on average, 0\.9\d+ at least; nearest", out)
    with LLM(tmp_path / "out", threads=1) as llm:
        assert len(llm.embed(["the mill"])[0].values) == 32
