"""The gates of the native core on real weights: float32 torch, llama.cpp, and the core's own arithmetic said in torch.

In full, with every figure printed (needs the models and data of docs/environment.md, and HEADRACE_PEER_PYTHON):
    OMP_NUM_THREADS=2 pytest tests/models/test_gates.py -m weights -s
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.native.runner import NativeRunner
from headrace.ops.context import FeedRows, build
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models import gates
from tests.models.data import data_folder, model_file
from tests.models.gates import BLOCK, Agreement, LlamaCpp, last_rows, runner_of
from tests.models.test_real_weights import PROMPTS
from tests.native_reference import bfloat16_attention, reference_of
from tests.tiny_native import Feeder

COUNT = 64
NAMES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
)
# Of a row's spread: sums in float32, and one value rounded to the next int8 or bfloat16 number.
NEAR, ROUNDED = 2e-5, 0.5


def answered(source: GGUFFile, runner: NativeRunner, prompts: list[str]) -> list[list[int]]:
    """Each prompt with 64 greedy tokens of the core after it."""
    tokenizer = Tokenizer.from_gguf(source.metadata)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    return [prompt + gates.generate(runner, prompt, COUNT) for prompt in tokens]


def check_float32(path: Path, prompts: list[str], llama_cpp: bool = False) -> None:
    """Teacher-forced, the 64 rows after each prompt."""
    with GGUFFile(path) as source:
        runner = runner_of(source)
        texts = answered(source, runner, prompts)
        ours = [Feeder(runner, [text]).whole()[0][-COUNT - 1 : -1] for text in texts]
        runner.close()
        model = load_model(source)
        better = [last_rows(model, text, COUNT + 1)[:-1] for text in texts]
    mine = Agreement()
    for rows, wanted in zip(ours, better, strict=True):
        mine.add(rows, wanted)
    print(f"\n{path.name}, {len(texts)} x {COUNT} tokens, against float32\n  headrace  {mine}")
    assert mine.top1 >= 0.95
    assert mine.worst < 4 * mine.rms
    if llama_cpp:
        check_divergence(path, mine, texts, better)
    # Negative control: the rows of other places agree with nothing.
    wrong = Agreement()
    wrong.add(np.roll(ours[0], 1, axis=0), better[0])
    assert wrong.top1 < 0.5
    assert wrong.divergence > 100 * mine.divergence


def check_divergence(path: Path, mine: Agreement, texts: list[list[int]], better: list[np.ndarray]) -> None:
    """Mean KL no larger than llama.cpp's: at most by what the prompts' own differences explain."""
    theirs = Agreement()
    with LlamaCpp(path) as peer:
        for text, wanted in zip(texts, better, strict=True):
            theirs.add(peer.rows(text, COUNT + 1, wanted.shape[1])[:-1], wanted)
    by_prompt = np.reshape(np.subtract(mine.divergences, theirs.divergences), (len(texts), -1)).mean(-1)
    error = by_prompt.std(ddof=1) / len(texts) ** 0.5
    print(f"  llama.cpp {theirs}\n  KL, ours less theirs: {by_prompt.mean():+.1e}, standard error over prompts {error:.1e}")
    assert by_prompt.mean() <= 2 * error


@pytest.mark.weights
def test_smollm2_agrees_with_float32() -> None:
    check_float32(model_file(NAMES[0]), PROMPTS[:4])


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_20_prompts_agree_with_float32(name: str) -> None:
    check_float32(model_file(name), PROMPTS)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", NAMES)
def test_20_prompts_diverge_no_more_than_llama_cpp(name: str) -> None:
    gates.peer_python()
    check_float32(model_file(name), PROMPTS, llama_cpp=True)


@torch.inference_mode()
def apart(runner: NativeRunner, reference: Model, tokens: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The core and its reference, layer by layer, each layer given the rows that the core gave to it.

    Returns the largest difference of a row in units of the spread of what the layer adds to it [layers, tokens], that of the
    logits [tokens], and the core's first choices less the reference's [tokens]. Rows are not handed through many layers: a
    value on the edge between two int8 numbers goes either way, and thirty layers make another rounding of it all.
    """
    count, config = len(tokens), reference.config
    feeder, blocks = Feeder(runner, [tokens]), -(-count // BLOCK)
    dtype = next(reference.parameters()).dtype
    context = build(KVPool(config, blocks, BLOCK, dtype), [FeedRows(tokens, list(range(blocks)), 0)])
    x = np.zeros((count, config.hidden_size), np.float32)
    feeder.feed((0, 0, count), layers=(0, 0), hidden_out=x)
    assert np.allclose(reference.embed(context).numpy(), x, rtol=1e-6, atol=0)
    layers, logits = [], np.empty(0)
    for layer in range(config.num_layers):
        y = np.zeros_like(x)
        (logits,) = feeder.feed((0, 0, count), layers=(layer, layer + 1), hidden=x, hidden_out=y)
        wanted = reference.layer(layer, torch.tensor(x, dtype=dtype), context).numpy()
        layers.append(np.abs(wanted - y).max(-1) / (wanted - x).std(-1))
        x = y
    wanted = reference.head(torch.tensor(x, dtype=dtype)).numpy()
    of_logits = np.abs(wanted - logits).max(-1) / wanted.std(-1)
    return np.stack(layers), of_logits, logits.argmax(-1) - wanted.argmax(-1)


def check_layers(path: Path, prompts: list[str], patch: pytest.MonkeyPatch) -> None:
    with GGUFFile(path) as source, bfloat16_attention(patch):
        model = load_model(source)
        runner = runner_of(source, model)
        texts = answered(source, runner, prompts)
        reference = reference_of(model, runner.weights, torch.float32)
        found = [apart(runner, reference, text) for text in texts]
    layers, logits, choices = (np.concatenate([one[i] for one in found], -1) for i in range(3))
    medians = np.median(layers, -1)
    print(
        f"\n{path.name}, {layers.shape[1]} tokens, against the same arithmetic in torch\n"
        f"  layers: median {np.median(layers):.1e} (by layer up to {medians[1:].max():.1e}, the first {medians[0]:.1e}), "
        f"rows with a value rounded otherwise {(layers[1:] > 1e-3).mean():.1%} (the first {(layers[0] > 1e-3).mean():.0%}), "
        f"largest {layers.max():.1e}\n"
        f"  logits: median {np.median(logits):.1e}, largest {logits.max():.1e}; {np.count_nonzero(choices)} other first choices"
    )
    # In the first layer ties are common: rows of an 8-bit table, whose values relate as whole numbers do.
    assert np.median(layers[1:]) < NEAR
    assert (medians[1:] < 10 * NEAR).mean() > 0.9
    assert layers.max() < ROUNDED
    assert np.median(logits) < NEAR
    assert logits.max() < ROUNDED
    assert not choices.any()


@pytest.mark.weights
def test_smollm2_is_its_own_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    check_layers(model_file(NAMES[0]), PROMPTS[:1], monkeypatch)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_20_prompts_are_their_own_arithmetic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_layers(model_file(name), PROMPTS, monkeypatch)


@pytest.mark.weights
def test_other_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: activations that are not quantised."""
    monkeypatch.setattr("tests.native_reference.int8_groups", lambda x: x)
    with pytest.raises(AssertionError):
        check_layers(model_file(NAMES[0]), PROMPTS[:1], monkeypatch)


def check_perplexity(path: Path, limit: int, tolerance: float, llama_cpp: bool = False) -> None:
    """Windows of 512 tokens of wikitext-2, the second half of each scored."""
    text = (data_folder("wikitext2") / "valid.txt").read_text("utf-8")
    found: dict[str, list[float]] = {"headrace": [], "float32": [], "llama.cpp": []}
    with GGUFFile(path) as source:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        text = text[: 16 * limit]  # more than enough
        start = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
        windows = list(gates.windows(tokenizer.encode(text, add_special=False)[:limit], start))
        runner = runner_of(source)
        for tokens in windows:
            (rows,) = Feeder(runner, [tokens]).whole()
            found["headrace"] += gates.scores(rows[255:-1], tokens[256:])
        runner.close()
        model = load_model(source)
        for tokens in windows:
            found["float32"] += gates.scores(last_rows(model, tokens, 257)[:-1], tokens[256:])
        del model
    if llama_cpp:
        with LlamaCpp(path) as peer:
            for tokens in windows:
                found["llama.cpp"] += peer.scores(tokens, 256)
    values = {name: gates.perplexity(logprobs) for name, logprobs in found.items() if logprobs}
    print(f"\n{path.name}, {len(windows)} windows, {len(found['headrace'])} tokens scored, perplexity: {values}")
    for name, value in values.items():
        assert abs(values["headrace"] / value - 1) < tolerance, name


@pytest.mark.weights
def test_smollm2_perplexity_of_one_window() -> None:
    check_perplexity(model_file(NAMES[0]), 512, 0.02)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("name", NAMES)
def test_perplexity(name: str) -> None:
    gates.peer_python()
    check_perplexity(model_file(name), 20_000, 0.005, llama_cpp=True)
