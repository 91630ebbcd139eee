"""The gates of the native core on real weights: float32 torch, llama.cpp, and the core's own arithmetic said in torch.

In full, with every figure printed (needs the models and data of docs/en/reference/environment.md, and HEADRACE_PEER_PYTHON):
    OMP_NUM_THREADS=2 pytest tests/models/test_gates.py -m weights -s
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.backends.native.program import NativeProgram
from headrace.models.registry import describe, read_config
from headrace.runner.streamed import TABLE, Streamed
from headrace.text.tokenizer import Tokenizer
from headrace.weights.gguf import GGUFFile
from tests.models import gates
from tests.models.gates import Agreement, LlamaCpp, program_of
from tests.models.real import PROMPTS
from tests.models.streamed import Narrowed
from tests.native_reference import bfloat16_attention
from tests.places import data_path, model_file
from tests.tiny_native import Feeder

COUNT = 64
NAMES = (
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
    "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
)
# Of a row's spread: sums in float32; what is more than that; and the most that values rounded to the next number do: one of the
# head's input moves a logit by largest / 127 * weight, at most a few times 1 / 127, and several meet in a layer.
NEAR, OTHER, ROUNDED, ROUNDED_LOGIT = 1e-5, 1e-3, 0.2, 0.05


def answered(source: GGUFFile, program: NativeProgram, prompts: list[str], count: int = COUNT) -> list[list[int]]:
    """Each prompt with greedy tokens of the core after it."""
    tokenizer = Tokenizer.from_gguf(source.metadata)
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    return [prompt + gates.generate(program, prompt, count) for prompt in tokens]


class Divergence:
    """How the core, and llama.cpp where it is asked for, agree with float32, text by text."""

    def __init__(self) -> None:
        self.ours, self.theirs = Agreement(), Agreement()
        self._by_text: list[float] = []

    def add(self, better: np.ndarray, ours: np.ndarray, theirs: np.ndarray | None) -> None:
        self.ours.add(ours, better)
        if theirs is not None:
            self.theirs.add(theirs, better)
            last = slice(-len(better), None)
            self._by_text.append(float(np.mean(self.ours.divergences[last]) - np.mean(self.theirs.divergences[last])))

    def check(self) -> None:
        """Mean KL no larger than llama.cpp's: at most by what the texts' own differences explain."""
        print(f"  headrace  {self.ours}")
        if self._by_text:
            mean, error = np.mean(self._by_text), np.std(self._by_text, ddof=1) / len(self._by_text) ** 0.5
            print(f"  llama.cpp {self.theirs}\n  KL, ours less theirs: {mean:+.1e}, standard error over texts {error:.1e}")
            assert mean <= 2 * error


def check_float32(path: Path, prompts: list[str], llama_cpp: bool = False) -> None:
    """Teacher-forced, the 64 rows after each prompt."""
    found, wrong = Divergence(), Agreement()
    with GGUFFile(path) as source, ExitStack() as stack:
        program = program_of(source)
        texts = answered(source, program, prompts)
        ours = [Feeder(program, [text]).whole()[0][-COUNT - 1 : -1] for text in texts]
        program.close()
        peer = stack.enter_context(LlamaCpp(path)) if llama_cpp else None
        for text, rows, better in zip(texts, ours, Streamed(source).logits(texts, COUNT), strict=True):
            found.add(better, rows, peer and peer.rows(text, COUNT + 1, better.shape[1])[:-1])
            if text is texts[0]:
                wrong.add(np.roll(rows, 1, axis=0), better)
    print(f"\n{path.name}, {len(texts)} x {COUNT} tokens, against float32")
    found.check()
    assert found.ours.top1 >= 0.95
    assert found.ours.worst < 4 * found.ours.rms
    # Negative control: the rows of other places agree with nothing.
    assert wrong.top1 < 0.5
    assert wrong.divergence > 100 * found.ours.divergence


@pytest.mark.weights
def test_smollm2_agrees_with_float32() -> None:
    check_float32(model_file(NAMES[0]), PROMPTS[:2])


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


@dataclass
class Apart:
    """The largest difference of each row from the reference: of layers [layers, tokens], in units of the spread of what a
    layer adds to the row, and of logits [tokens], in units of theirs; and how many first choices are others."""

    layers: np.ndarray
    logits: np.ndarray
    choices: int

    def __str__(self) -> str:
        rest, first = self.layers[1:], self.layers[0]
        return (
            f"layers: median {np.median(rest):.1e}, rows with a value rounded otherwise {self.rounded:.1%} (the first layer "
            f"{(first > OTHER).mean():.0%}), 999 of 1000 below {np.quantile(rest, 0.999):.3f}, largest {rest.max():.3f} "
            f"(the first layer {first.max():.3f}); logits: median {np.median(self.logits):.1e}, rounded otherwise "
            f"{(self.logits > OTHER).mean():.2%}, largest {self.logits.max():.1e}; {self.choices} other first choices"
        )

    @property
    def rounded(self) -> float:
        """The share of rows with a value that was rounded the other way, in all layers but the first."""
        return float((self.layers[1:] > OTHER).mean())


@torch.inference_mode()
def apart(
    program: NativeProgram, exact: Streamed, single: Streamed, texts: list[list[int]], layers: int | None
) -> tuple[Apart, Apart]:
    """How far the core, and the same arithmetic in torch's float32, are from that in float64, layer by layer (None: all).

    Each layer is given the rows that the core gave to it. Rows are not handed through many layers: a value on the edge
    between two int8 numbers goes either way, and thirty layers make another rounding of it all.
    """
    config, feeders = exact.model.config, [Feeder(program, [text]) for text in texts]
    contexts = list(zip(exact.contexts(texts), single.contexts(texts), strict=True))
    rows = [np.zeros((len(text), config.hidden_size), np.float32) for text in texts]
    with exact.holding(TABLE):
        for feeder, x, (context, _) in zip(feeders, rows, contexts, strict=True):
            feeder.feed((0, 0, len(x)), layers=(0, 0), hidden_out=x)
            assert np.allclose(exact.model.embed(context).numpy(), x, rtol=1e-6, atol=0)
    found: list[list[np.ndarray]] = []
    for layer in range(layers or config.num_layers):
        found.append([])
        with exact.holding(f"layers.{layer}"), single.holding(f"layers.{layer}"):
            for number, (feeder, x, (at64, at32)) in enumerate(zip(feeders, rows, contexts, strict=True)):
                y = np.zeros_like(x)
                feeder.feed((0, 0, len(x)), layers=(layer, layer + 1), hidden=x, hidden_out=y)
                wanted = exact.model.layer(layer, torch.tensor(x, dtype=torch.float64), at64).numpy()
                other = single.model.layer(layer, torch.tensor(x), at32).numpy()
                found[-1].append(differences(wanted, (wanted - x).std(-1), y, other))
                rows[number] = y
    logits, choices = [], [0, 0]
    with exact.holding(exact.head), single.holding(single.head):
        for feeder, x in zip(feeders, rows, strict=True):
            (ours,) = feeder.feed((0, 0, len(x)), layers=(config.num_layers, config.num_layers), hidden=x)
            wanted, other = (side.model.head(torch.tensor(x, dtype=side.dtype)).numpy() for side in (exact, single))
            logits.append(differences(wanted, wanted.std(-1), ours, other))
            for which, each in enumerate((ours, other)):
                choices[which] += np.count_nonzero(each.argmax(-1) != wanted.argmax(-1))
    by_layer = np.stack([np.concatenate(each, -1) for each in found], 1)
    core, torch32 = (Apart(by_layer[i], np.concatenate(logits, -1)[i], choices[i]) for i in range(2))
    return core, torch32


def differences(wanted: np.ndarray, unit: np.ndarray, *rows: np.ndarray) -> np.ndarray:
    """The largest difference of each row [computations, tokens]."""
    return np.stack([np.abs(wanted - each).max(-1) / unit for each in rows])


def check_layers(
    path: Path, prompts: list[str], patch: pytest.MonkeyPatch, count: int = COUNT, layers: int | None = None
) -> None:
    with GGUFFile(path) as source, bfloat16_attention(patch):
        model = describe(read_config(source))
        program = program_of(source, model)
        texts = answered(source, program, prompts, count)
        exact, single = (Narrowed(source, dtype, model, program.weights) for dtype in (torch.float64, torch.float32))
        core, torch32 = apart(program, exact, single, texts, layers)
    print(f"\n{path.name}, {sum(map(len, texts))} tokens, against the same arithmetic in float64")
    print(f"  headrace        {core}\n  torch's float32 {torch32}")
    assert np.median(core.layers[1:]) < NEAR
    assert np.median(core.logits) < NEAR
    assert not core.choices
    # Where a value is rounded otherwise, it is as often and as far as between two precisions of torch.
    assert core.rounded < 1.5 * torch32.rounded
    assert core.layers.max() < ROUNDED
    assert core.logits.max() < ROUNDED_LOGIT


@pytest.mark.weights
def test_smollm2_layers_match_the_reference_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    check_layers(model_file(NAMES[0]), PROMPTS[:1], monkeypatch)


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_20_prompts_are_their_own_arithmetic(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_layers(model_file(name), PROMPTS, monkeypatch)


@pytest.mark.weights
@pytest.mark.parametrize("without", ["int8_groups", "rounded"])
def test_other_arithmetic_is_noticed(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: activations that are not quantised; K, V, queries and weights of attention that are not rounded."""
    monkeypatch.setattr(f"tests.native_reference.{without}", lambda x: x)
    with pytest.raises(AssertionError):
        check_layers(model_file(NAMES[0]), PROMPTS[:1], monkeypatch, 8, layers=4)


def check_perplexity(path: Path, limit: int, tolerance: float, llama_cpp: bool = False) -> None:
    """Windows of 512 tokens of wikitext-2, the second half of each scored; and how far the logits there are from float32's."""
    text = (data_path("wikitext2") / "valid.txt").read_text("utf-8")
    scores: dict[str, list[float]] = {"headrace": [], "float32": [], "llama.cpp": []}
    found = Divergence()
    with GGUFFile(path) as source, ExitStack() as stack:
        tokenizer = Tokenizer.from_gguf(source.metadata)
        text = text[: 16 * limit]  # more than enough
        start = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
        windows = list(gates.windows(tokenizer.encode(text, add_special=False, parse_special=False)[:limit], start))
        program = program_of(source)
        peer = stack.enter_context(LlamaCpp(path)) if llama_cpp else None
        for tokens, better in zip(windows, Streamed(source).logits(windows, 256), strict=True):
            ours = Feeder(program, [tokens]).whole()[0][255:-1]
            theirs = peer and peer.rows(tokens, 257, better.shape[1])[:-1]
            found.add(better, ours, theirs)
            for name, rows in (("headrace", ours), ("float32", better), ("llama.cpp", theirs)):
                scores[name] += [] if rows is None else gates.scores(rows, tokens[256:])
        program.close()
    values = {name: gates.perplexity(logprobs) for name, logprobs in scores.items() if logprobs}
    print(f"\n{path.name}, {len(windows)} windows, {len(scores['headrace'])} tokens scored, perplexity: {values}")
    for name, value in values.items():
        assert abs(values["headrace"] / value - 1) < tolerance, name
    found.check()


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
