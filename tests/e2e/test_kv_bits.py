"""K and V in int8 and int4: the core's kernels hold what torch's `Rounded` does, less a constant that no softmax sees."""

import json
import logging
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.compress.calibration_pass import mean_keys
from headrace.kv import rounded
from headrace.kv.layout import kv_shape
from headrace.kv.pool import KVPool
from headrace.kv.rounded import Rounded, to_int4
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.runner.centring import k_shifts
from headrace.startup.opening import open_files
from headrace.weights.kv_settings import kv_settings
from headrace.weights.loader import load_model
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.models.test_compress import write_folder
from tests.tiny import tiny_config, tiny_model
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import Feeder, as_bfloat16, native_program, packed

TEXTS = np.random.default_rng(3).integers(0, 97, (3, 40)).tolist()


@lru_cache(maxsize=1)
def offset() -> Model:
    """Keys have much in common: a large bias where the rotation hardly turns them."""
    model = tiny_model(tiny_config("qwen2", head_dim=32))
    still = model.ropes[0].inv_freq * 40 < 0.5  # type: ignore[attr-defined]
    for layer in model.layers:
        _, k, _ = layer.qkv.bias.split(layer.qkv.sizes)
        k.view(-1, 32).mul_(torch.where(still, 60.0, 1.0).repeat(2))
    return as_bfloat16(model)


@lru_cache(maxsize=1)
def centre() -> np.ndarray:
    return means(offset(), TEXTS)


@torch.no_grad()
def means(model: Model, texts: list[list[int]]) -> np.ndarray:
    """Of the keys that a pool holds after each text, float32 [layers, KV heads * head size]."""
    layers, heads, head_dim = kv_shape(model.config)
    sums = torch.zeros(layers, heads * head_dim, dtype=torch.float64)
    for text in texts:
        pool = KVPool(model.config, -(-len(text) // 16), 16, torch.float64)
        model(build(pool, [FeedRows(text, range(pool.num_blocks))]))
        for layer in range(layers):
            sums[layer] += pool.kv(layer)[0].flatten(0, 1)[: len(text)].sum(0).flatten()
    rows: np.ndarray = (sums / sum(map(len, texts))).float().numpy()
    return rows


@torch.no_grad()
def by_torch(make: Callable[..., KVPool]) -> list[np.ndarray]:
    """Logits of all rows, in float64, with K and V where `make` keeps them."""
    model, texts = offset(), TEXTS
    tables = [range(3 * number, 3 * number + 3) for number in range(len(texts))]
    pool = make(model.config, 3 * len(texts), 16, torch.float64)
    logits = model(build(pool, [FeedRows(text, table) for text, table in zip(texts, tables, strict=True)]))
    return [rows.numpy() for rows in logits.split([len(text) for text in texts])]


def rounded_pool(format: str, centred: bool = True) -> Callable[..., KVPool]:
    shift = dict(enumerate(torch.from_numpy(centre()).view(kv_shape(offset().config)))) if centred else None
    return lambda *sizes: KVPool(*sizes, rounding=Rounded(format, shift))


def by_core(kv_dtype: str, centred: bool = True) -> list[np.ndarray]:
    """Not centred: K is less nothing, its bias neither."""
    shift = centre() if centred else np.zeros_like(centre())
    return Feeder(native_program(offset(), kv_dtype=kv_dtype, centre=dict(enumerate(shift))), TEXTS).whole()


def apart(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """RMS of the difference, in units of the spread."""
    return float(np.mean([np.sqrt(np.mean(np.square(a - b))) / b.std() for a, b in zip(one, other, strict=True)]))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_core_equals_torch_with_rounded_kv(format: str) -> None:
    """What one loses, so does the other; a number between two codes goes either way, and the next layer makes more of it. The
    control: K and V as they are, are farther from either."""
    near, floor = apart(by_core(format), by_torch(rounded_pool(format))), apart(by_core("float32"), by_torch(KVPool))
    lost = apart(by_torch(rounded_pool(format)), by_torch(KVPool))
    print(f"{format}: {near:.5f} from torch, {floor:.5f} in float32; {lost:.5f} lost")
    assert near < 2 * floor + 0.4 * lost
    if format == "int4":
        assert apart(by_core(format), by_torch(KVPool)) > 2 * near


def test_only_a_constant_shift_of_all_keys_changes_nothing() -> None:
    assert apart(by_core("float32"), by_core("float32", centred=False)) < 0.02
    shift = torch.from_numpy(centre()).view(kv_shape(offset().config)).double()

    class Shifted(KVPool):
        by_token = False

        def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            share = slots[:, None, None] % 7 / 7 if self.by_token else 1.0
            super().write(layer, slots, k - shift[layer] * share, v)

    class ByToken(Shifted):
        by_token = True

    assert apart(by_torch(Shifted), by_torch(KVPool)) < 1e-9
    assert apart(by_torch(ByToken), by_torch(KVPool)) > 0.1, "the control"


def test_centred_keys_lose_less_in_4_bits() -> None:
    """In both back ends; the control is the same without it."""
    exact = by_torch(KVPool)
    for run in (by_core, lambda format, centred: by_torch(rounded_pool(format, centred))):
        centred, plain = (apart(run("int4", which), exact) for which in (True, False))
        print(f"less the mean {centred:.4f}, as it is {plain:.4f}")
        assert centred < 0.7 * plain


def test_torch_and_the_core_subtract_the_same_common_bias(tmp_path: Path) -> None:
    """Where a file says nothing, in engines too. The control: without it more is lost."""
    shift = k_shifts(offset(), lambda layer: None if layer.bias is None else layer.bias.float().numpy())
    core = k_shifts(offset(), packed(offset()).bias)
    assert shift.keys() == core.keys() == set(offset().config.kv_layers)
    assert all(np.array_equal(shift[layer], core[layer]) and shift[layer].any() for layer in shift)
    head_dim, exact = kv_shape(offset().config).head_dim, by_torch(KVPool)
    common = {layer: torch.from_numpy(row).view(-1, head_dim) for layer, row in shift.items()}
    less = apart(by_torch(lambda *sizes: KVPool(*sizes, rounding=Rounded("int4", common))), exact)
    plain = apart(by_torch(rounded_pool("int4", False)), exact)
    print(f"less what biases have in common {less:.4f}, as it is {plain:.4f}")
    assert less < 0.9 * plain
    for name, has in (("qwen2-tied", True), ("llama-gqa", False)):
        llm = LLM(write_folder(tmp_path / name, name), backend="torch", kv_dtype="int4", max_model_len=64)
        assert bool(llm.runner.programs[0].pool._rounding._centre) == has  # type: ignore[attr-defined]
        assert llm.generate(["the water"], SamplingParams(max_tokens=2, temperature=0.0))[0].error is None


def test_rounding_of_each_half_and_of_ranges_without_width() -> None:
    x = torch.cat([torch.linspace(-1, 1, 16), torch.linspace(90, 110, 16)]).view(1, 1, 32)
    assert (to_int4(x, 2) - x)[..., :16].abs().max() <= 1 / 15 * 1.02
    assert (to_int4(x, 1) - x)[..., :16].abs().max() > 1, "one scale: the control"
    assert torch.equal(to_int4(torch.full((1, 1, 32), 3.0)), torch.full((1, 1, 32), 3.0))
    assert torch.equal(to_int4(torch.zeros(2, 1, 20)), torch.zeros(2, 1, 20))
    assert to_int4(torch.full((1, 1, 16), torch.nan)).isnan().all()
    assert rounded.to_int8(torch.full((1, 1, 16), torch.nan)).isnan().all()
    assert torch.equal(rounded.by_channel(x.expand(40, 1, 32))[32:], x.expand(8, 1, 32)), "fewer than 32 stay"


def test_mean_keys_equals_the_mean_of_the_stored_keys(tiny_gguf: Path) -> None:
    source = open_files(tiny_gguf).source
    texts = [[1, 2, 3, 4, 5], list(range(5, 40))]
    found = mean_keys(source, texts)
    assert np.allclose(found, means(load_model(source, torch.float64), texts), atol=1e-4)
    assert not np.allclose(found, means(load_model(source, torch.float64), texts[1:]), atol=1e-4), "the control"


@pytest.mark.parametrize(("out", "format"), [("out.gguf", "Q8_0"), ("out", "int8")])
def test_a_written_model_selects_its_kv_format(
    shell: Shell, tmp_path: Path, out: str, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The file has the mean of keys; who opens it without a word gets int4, in both back ends; `inspect` says it."""
    model, text = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text(" ".join(f"{number}" for number in range(500)))
    given = ("compress", model, "-o", tmp_path / out, "-f", format, "--kv", "int4", "--calibrate", text, "--tokens", 256)
    said_before = json.loads(shell(*given, "--dry-run", "--json")[1])["kv"]
    code, _, err = shell(*given)
    assert code == 0, err
    opened = open_files(tmp_path / out)
    said = kv_settings(opened.source, opened.config)
    assert said is not None
    assert said.format == "int4"
    assert said.centre.shape == (2, 16)
    assert np.abs(said.centre).max() > 0
    with caplog.at_level(logging.INFO, "headrace"):
        llms = [LLM(tmp_path / out, backend=backend, kv_cache_memory=1 << 22) for backend in ("native", "torch")]
    assert "K and V in int4" in caplog.text
    assert "it saves no memory" in caplog.text
    page = 16 * 16 + 192
    assert llms[0].runner.kv_bytes() == llms[0].memory_plan.num_blocks * 2 * 2 * page
    assert (said_before["format"], 16 * said_before["bytes"]) == ("int4", 2 * 2 * page)
    for llm in (*llms, LLM(tmp_path / out, kv_dtype="bfloat16")):
        assert llm.generate(["1 2 3"], SamplingParams(max_tokens=4, temperature=0.0))[0].error is None
    assert shell("inspect", tmp_path / out, "--json")[1].count('"kv": "int4"') == 1
    assert "K and V:         int4, unless another" in shell("inspect", tmp_path / out)[1]
    code, _, err = shell("compress", tmp_path / out, "-o", tmp_path / "again.gguf", "-f", "Q8_0")
    assert code == 0
    assert "asks for K and V in int4, and what is written does not" in err


def test_invalid_kv_settings_of_a_folder_are_a_one_line_error(shell: Shell, tmp_path: Path) -> None:
    model, out = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "out"
    assert shell("compress", model, "-o", out, "-f", "int8", "--kv", "int3")[0] == 1
    assert shell("compress", model, "-o", out, "-f", "int8")[0] == 0
    for said, wanted in (
        ('{"kv": {"format": "int4", "centre": [1, 2, 3]}}', "as this model cannot have them"),
        ('{"kv": {"format": "int3", "centre": []}}', "as this model cannot have them"),
        ("{", "cannot be read"),
    ):
        (out / "headrace.json").write_text(said)
        with pytest.raises(WeightError, match=wanted) as caught:
            LLM(out)
        assert "\n" not in str(caught.value)
    (out / "headrace.json").write_text(json.dumps({"compress": "rtn"}))
    assert LLM(out).backend == "native"
