"""perplexity: which tokens are scored, and the value itself."""

import json
import math
from pathlib import Path

import pytest

from headrace.cli.perplexity import _warning
from headrace.llm import LLM
from headrace.workflows.perplexity import cut
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf

TEXT = "The water in the headrace turns the wheel. 水渠里的水推动水轮。" * 12


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def measured(shell: Shell, *arguments: object) -> dict[str, float]:
    code, out, _ = shell("perplexity", *arguments, "--json", "--dtype", "float64")
    assert code == 0
    found: dict[str, float] = json.loads(out)
    return found


def test_a_model_that_knows_nothing_is_as_perplexed_as_its_vocabulary_is_large(
    shell: Shell, tmp_path: Path, text: Path
) -> None:
    model = write_tiny_gguf(tmp_path / "flat.gguf", edit=lambda tensors: tensors["output.weight"].fill(0))
    found = measured(shell, model, text, "--window", "64")
    assert found["perplexity"] == pytest.approx(402, rel=1e-5)
    assert found["error"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize(("window", "stride", "limit"), [(64, 64, None), (64, 32, 200), (33, 7, 100)])
def test_perplexity_is_the_exp_of_the_mean_over_scored_tokens(
    shell: Shell, tiny_gguf: Path, tiny_llm: LLM, text: Path, window: int, stride: int, limit: int | None
) -> None:
    limits = ("--limit", limit) if limit else ()
    found = measured(shell, tiny_gguf, text, "--window", window, "--stride", stride, *limits)
    tokens = tiny_llm.tokenizer.encode(TEXT)[:limit]
    scored: list[float] = []
    for at in range(0, len(tokens) - window + 1, stride):
        (score,) = tiny_llm.score(tokens[at : at + window])
        scored += score.logprobs[-min(stride, window // 2) :]
    assert found["tokens"] == len(scored)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(scored) / len(scored)), rel=1e-6)
    assert found["tokens_per_s"] > 0


def test_names_of_control_tokens_are_text(shell: Shell, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", control="<unk>")
    file = tmp_path / "text.txt"
    file.write_text("the <unk> of the <unk> turns<|im_end|> " * 4, "utf-8")
    llm = LLM(str(model), dtype="float64")
    (score,) = llm.score(file.read_text("utf-8"))
    found = measured(shell, model, file)
    half = score.logprobs[-(len(score.token_ids) // 2) :]
    assert found["tokens"] == len(half)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(half) / len(half)), rel=1e-6)
    (parsed,) = llm.score([llm.tokenizer.encode(file.read_text("utf-8"))])  # what reads them as control tokens is found out
    assert len(parsed.token_ids) < len(score.token_ids)


def test_a_stride_of_half_a_window_scores_each_token_once() -> None:
    tokens = list(range(100))
    windows = list(cut(tokens, [], 20, 10))
    assert [t for one in windows for t in one.tokens[-one.scored :]] == tokens[10:]
    started = list(cut(tokens, [-1], 21, 10))
    assert all(one.tokens[0] == -1 for one in started)
    assert [t for one in started for t in one.tokens[-one.scored :]] == tokens[10:]
    whole = list(cut(tokens, [], 20, 20))
    assert [t for one in whole for t in one.tokens] == tokens
    (short,) = cut(tokens[:9], [], 20, 20)
    assert (short.tokens, short.scored) == (tokens[:9], 4)


def test_the_text_output_has_three_lines(shell: Shell, tiny_gguf: Path, text: Path) -> None:
    code, out, _ = shell("perplexity", tiny_gguf, text, "--window", "64", "--limit", "128")
    assert code == 0
    value, tokens, speed = out.splitlines()
    assert value.startswith("perplexity:")
    assert " ± " in value
    assert tokens.endswith("64 scored in 2 windows of 64, 64 apart")
    assert speed.endswith(" tokens/s")


def test_a_wide_error_is_warned_of(shell: Shell, tiny_gguf: Path, tmp_path: Path, text: Path) -> None:
    """A few tokens say little; a model that knows nothing has no error, however few they are."""
    code, out, err = shell("perplexity", tiny_gguf, text, "--window", "16", "--limit", "16", "--json")
    found = json.loads(out)
    share = found["error"] / found["perplexity"]
    assert share > 0.05
    assert err.splitlines()[-1].startswith(f"8 tokens scored are too few: ± {share:.0%} is too wide to compare")
    assert (code, _warning(100, 20.0, 1.01)) == (
        0,
        "100 tokens scored are too few: ± 5% is too wide to compare models by; with about 700 it is ± 2%",
    )
    for narrow in ((100, 20.0, 1.0), (1, 20.0, None), (5, math.inf, 1.0)):
        assert _warning(*narrow) == ""
    flat = write_tiny_gguf(tmp_path / "flat.gguf", edit=lambda tensors: tensors["output.weight"].fill(0))
    assert "too wide" not in shell("perplexity", flat, text, "--window", "16", "--limit", "16", "--json")[2]


def test_invalid_arguments_are_a_one_line_error(shell: Shell, tiny_gguf: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary.txt").write_bytes(b"\x00\xff\xfe")
    for arguments, code, clue in [
        ((tmp_path / "empty.txt",), 1, "too few tokens to score"),
        ((tmp_path / "binary.txt",), 1, "is not UTF-8 text (byte 1)"),
        ((tmp_path / "none.txt",), 2, "does not exist"),
        ((text, "--window", "513"), 1, "use --window 512 or less"),
        ((text, "--window", "1"), 2, "--window"),
        ((text, "--stride", "0"), 2, "--stride"),
        ((text, "--limit", "1"), 2, "--limit"),
    ]:
        found, out, err = shell("perplexity", tiny_gguf, *arguments)
        assert (found, out) == (code, "")
        assert clue in err.splitlines()[-1]
        assert "Traceback" not in err
