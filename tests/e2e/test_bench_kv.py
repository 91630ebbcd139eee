"""bench kv: loss and speed of K/V formats; on SmolLM2 within the documented bounds."""

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.bench import kv
from headrace.bench.interleave import Cell
from headrace.bench.kv import EXACT, FORMATS, measure_losses
from headrace.compress.calibration_pass import TOKENS, mean_keys
from headrace.compress.texts import draw_texts
from headrace.data.progress import Progress
from headrace.startup.opening import open_files
from tests.cli_shell import Shell
from tests.places import data_path, model_file

BY_NAME = {variant.name: variant for variant in FORMATS}


def test_more_bits_lose_less_and_a_format_without_rounding_nothing(tiny_gguf: Path) -> None:
    source = open_files(tiny_gguf).source
    texts = np.random.default_rng(0).integers(0, 97, (4, 80)).tolist()
    names = ("bfloat16", "int8", "int4", "int4, K alone", "int4, V alone", "int4, K by channel (not served)")
    perplexity, found = measure_losses(source, texts, mean_keys(source, texts), [EXACT, *(BY_NAME[name] for name in names)])
    made = {one.name: one.record() for one in found}
    assert perplexity > 1
    assert (made["float32"]["nll"], made["float32"]["kl"], made["float32"]["same_choice"]) == (0, 0, 1)
    assert made["int8"]["kl"] < made["int4"]["kl"]
    assert all(made[name]["kl"] > 0 for name in names)
    layers, heads, head_dim = 2, 2, 8
    assert made["int4"]["token_bytes"] == layers * heads * (head_dim + 12), "4 bits a number, six numbers of 16 bits"
    assert made["bfloat16"]["token_bytes"] == layers * heads * 4 * head_dim


def test_figures_of_a_text(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    text, file = tmp_path / "text.txt", tmp_path / "kv.json"
    text.write_text(" ".join(f"{number}" for number in range(300)))
    given = ("bench", "kv", tiny_gguf, "--text", text, "--limit", 256, "--window", 64, "--json", file)
    code, out, err = shell(*given)
    assert code == 1
    assert "measured on, where a model looks better" in err, "the control: a short text is all measured on"
    text.write_text(" ".join(f"{number}" for number in range(9000)))
    code, out, err = shell(*given)
    assert code == 0, err
    found = json.loads(file.read_text())
    assert found["tokens"] == 128
    assert [one["name"] for one in found["formats"]] == list(BY_NAME)
    assert "NATS LOST" in out
    assert shell("bench", "kv", tiny_gguf)[0] == 2


def test_speeds_side_by_side(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes, each with its own number format."""
    told: list[str] = []
    found = kv.speeds(str(tiny_gguf), [Cell("b1", 1, 16, 4)], rounds=1, threads=1, say=told.append)
    assert set(found["b1"]["tokens_per_s"]) == {"bfloat16", "int8", "int4"}
    one, other = (found["b1"]["samples"][name][0] for name in ("int4", "int8"))
    assert found["b1"]["ratio"] == one / other
    assert len([line for line in told if "loaded in" in line]) == 3


@pytest.mark.weights
@pytest.mark.slow
def test_losses_of_smollm2_stay_within_the_bounds() -> None:
    """Wikitext-2, 8 windows of 512, 2,048 tokens scored; half heads and the mean of keys each take more than a third off."""
    opened = open_files(model_file("SmolLM2-135M-Instruct.Q4_1.gguf"))
    text = str(data_path("wikitext2/valid.txt"))
    scored = draw_texts(opened, text, 4096, 0, Progress(), 512, judging=True)
    centre = mean_keys(opened.source, draw_texts(opened, text, TOKENS, 0, Progress(), 512))
    plain = "int4, one scale, K not centred"
    names = ("int8", "int4", "int4, K not centred", "int4, one scale for K", plain)
    lost = {
        one.name: one.record()["nll"] for one in measure_losses(opened.source, scored, centre, [BY_NAME[n] for n in names])[1]
    }
    print({name: round(value, 4) for name, value in lost.items()})
    assert lost["int8"] <= 0.005
    assert lost["int4, K not centred"] <= 0.7 * lost[plain], "half heads"
    assert lost["int4, one scale for K"] <= 0.7 * lost[plain], "the mean of keys"
    assert lost["int4"] <= 0.7 * lost[plain]
