"""Embeddings: BERT equals `transformers`, and pooling a decoder's rows does not depend on how its prompt was fed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.data.params import SamplingParams
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.runner.record import Recording, record
from headrace.runner.wants import add_rows
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.places import data_path, model_file
from tests.tiny_bert import CONTEXT, HIDDEN, write_tiny_bert
from tests.tiny_files import write_tiny_gguf

TEXTS = ["The mill stands by a river.", "a wheel", "Water turns the wheel, the wheel turned the mills. " * 3]
NEAR = 0.9998  # cosine with float32 of what is computed with bfloat16 weights, by their eight bits
EXACT: dict[str, Any] = {"backend": "torch", "dtype": "float64", "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("decoder") / "tiny.gguf")


@torch.no_grad()
def oracle(folder: Path, ids: list[int]) -> np.ndarray:
    """Hidden rows [tokens, width] of a BERT by `transformers`."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows: np.ndarray = model(torch.tensor([ids])).last_hidden_state[0].double().numpy()
    return rows


def cosine(a: Any, b: Any) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


POOLED = [("mean", slice(None)), ("first", slice(1)), ("last", slice(-1, None))]


@pytest.mark.parametrize(("pooling", "rows"), POOLED)
def test_bert_equals_transformers(bert: Path, pooling: str, rows: slice) -> None:
    llm = LLM(bert, backend="torch", threads=1, device="cpu")
    made = llm.embed(TEXTS, pooling=pooling)
    for one in made:
        expected = oracle(bert, one.token_ids)
        assert cosine(one.values, expected[rows].mean(0)) > 0.99999
        assert np.linalg.norm(one.values) == pytest.approx(1)
    others = oracle(bert, made[1].token_ids)[1:-1].mean(0)
    assert cosine(made[1].values, others) < 0.999  # else which rows are pooled would not matter
    assert made[0].token_ids[0] == 2
    assert made[0].token_ids[-1] == 3
    alone = [llm.embed(text, pooling=pooling)[0].values for text in TEXTS]
    assert np.abs(np.array(alone) - [one.values for one in made]).max() < 1e-6
    llm.close()


@pytest.mark.parametrize(("pooling", "rows"), POOLED)
def test_bert_runs_on_the_native_core(bert: Path, pooling: str, rows: slice) -> None:
    """As near to float32 as bfloat16 weights let it be, and a text's vector is the same bits alone and in any company."""
    llm = LLM(bert, threads=1, device="cpu")
    assert (llm.backend, llm.exactness) == ("native", "bitwise")
    made = llm.embed(TEXTS, pooling=pooling)
    for one in made:
        assert cosine(one.values, oracle(bert, one.token_ids)[rows].mean(0)) > NEAR
    assert [llm.embed(text, pooling=pooling)[0].values for text in TEXTS] == [one.values for one in made]
    assert [one.values for one in llm.embed(TEXTS[::-1], pooling=pooling)] == [one.values for one in made[::-1]]
    llm.close()


BREAKS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "causal attention": lambda op, settings: settings.update(causal=True) if op == "attention" else None,
    "no token types": lambda op, settings: settings.update(types=None) if op == "embed" else None,
    "the other gelu": lambda op, settings: settings.update(kind="silu") if op == "act" else None,
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_encoder_would_be_seen(bert: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a recording that is changed in one op."""

    def broken(model: Model, *which: Any) -> Recording:
        made = record(model, *which)
        for segment in (made.embed, *made.layers):
            for node in segment.nodes:
                BREAKS[what](node.op, node.settings)
        return made

    monkeypatch.setattr("headrace.backends.native.program.record", broken)
    llm = LLM(bert, backend="native", threads=1)
    near = [cosine(one.values, oracle(bert, one.token_ids).mean(0)) for one in llm.embed(TEXTS)]
    assert min(near) < 1 - 5 * (1 - NEAR)
    llm.close()


@pytest.mark.parametrize(("backend", "least"), [("native", NEAR), ("torch", 0.99999)])
def test_an_encoder_takes_whole_prompts_and_generates_nothing(bert: Path, backend: str, least: float) -> None:
    llm = LLM(bert, backend=backend, threads=1, device="cpu", max_num_batched_tokens=8)  # less than one of these texts
    full = [2, *range(4, 4 + CONTEXT - 2), 3]
    prompts = [full, [2, 5, 3], full[:40], full]
    made = llm.embed(prompts)
    for one in made:
        assert cosine(one.values, oracle(bert, one.token_ids).mean(0)) > least
    assert made[0].values == made[3].values
    llm.engine.check()
    with pytest.raises(AdmissionError, match=f"{CONTEXT + 1} tokens and the model takes {CONTEXT}"):
        llm.embed([[*full, 3]])
    with pytest.raises(AdmissionError, match="request embeddings or classes"):
        llm.generate("the mill")
    llm.close()


@pytest.mark.weights
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_minilm_equals_transformers(backend: str) -> None:
    folder = model_file("all-MiniLM-L6-v2")
    llm = LLM(folder, backend=backend, threads=1, device="cpu")
    texts = [
        "The mill stands by the river.",
        "A headrace brings water to the wheel.",
        "猫 und Käse: naïve façade",
        "mill " * 300,
    ]
    close, far = "A wheel is driven by water.", "The parliament passed the budget."
    made = llm.embed([*texts, close, far])
    for one in made[: len(texts)]:
        assert cosine(one.values, oracle(folder, one.token_ids).mean(0)) >= 0.9999
    assert cosine(made[1].values, made[4].values) > cosine(made[1].values, made[5].values) + 0.2
    llm.close()


@pytest.mark.weights
@pytest.mark.slow
def test_minilm_in_eight_bits_keeps_neighbours() -> None:
    """Of 500 sentences: how near each vector stays, and whether the nearest other sentence is the same one."""
    folder, texts = model_file("all-MiniLM-L6-v2"), data_path("multi30k/test_2016_flickr_first500.en").read_text().splitlines()
    vectors = {}
    for quantize in (None, "int8"):
        with LLM(folder, backend="native", threads=1, quantize=quantize) as llm:
            made = np.array([one.values for one in llm.embed(texts)])
        vectors[quantize] = made / np.linalg.norm(made, axis=1, keepdims=True)
    before, after = (found @ found.T - 2 * np.eye(len(texts)) for found in vectors.values())
    near = (vectors[None] * vectors["int8"]).sum(1)
    chosen = after.argmax(1)
    kept, farther = (before.argmax(1) == chosen).mean(), (before.max(1) - before[np.arange(len(texts)), chosen]).max()
    print(f"cosine {near.mean():.5f}, least {near.min():.5f}; the same neighbour for {kept:.1%}, else {farther:.4f} farther")
    assert near.min() >= 0.999
    assert kept >= 0.95  # captions are much alike
    assert farther <= 0.01


def test_bert_files_that_cannot_be_run_are_refused(bert: Path, tmp_path: Path) -> None:
    for change, says in (
        ({"position_embedding_type": "relative_key"}, "relative positions"),
        ({"hidden_act": "relu"}, "built with gelu"),
        ({"is_decoder": True}, "is_decoder"),
        ({"num_attention_heads": 5}, "no multiple"),
    ):
        folder = tmp_path / says.split()[0]
        write_tiny_bert(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(WeightError, match=says):
            LLM(folder)


@pytest.mark.parametrize("kind", ["bert", "decoder"])
def test_names_of_control_tokens_are_text(bert: Path, decoder: Path, kind: str) -> None:
    llm = LLM(bert if kind == "bert" else decoder, **EXACT)
    text = "a wheel [SEP] a mill<|im_end|>"
    (one,) = llm.embed(text)
    plain = llm.tokenizer.encode(text, parse_special=False)
    assert one.token_ids == plain != llm.tokenizer.encode(text)
    assert llm.embed([plain])[0].values == one.values
    llm.close()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_a_decoders_rows_are_pooled_however_they_are_fed(decoder: Path, pooling: str) -> None:
    texts = ["The mill stands by a river. " * 4, "water", "The mill stands by a river. " * 3 + "No."]
    whole = LLM(decoder, **EXACT)
    expected = [one.values for one in whole.embed(texts, pooling=pooling)]
    other = [one.values for one in whole.embed(texts, pooling="last" if pooling == "mean" else "mean")]
    assert max(cosine(a, b) for a, b in zip(expected, other, strict=True)) < 0.99
    small = LLM(decoder, **EXACT, max_num_batched_tokens=7, max_model_len=128, kv_cache_memory=128 * 512)
    small.generate(texts, SamplingParams(max_tokens=2))  # fills the prefix cache: what is matched has no hidden rows
    for _ in range(2):
        got = [one.values for one in small.embed(texts, pooling=pooling)]
        assert np.abs(np.array(got) - expected).max() < 1e-9
    small.engine.check()
    whole.close()
    small.close()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_on_the_native_core_a_decoders_vector_depends_on_no_chunk(decoder: Path, pooling: str) -> None:
    """The same bits under every token budget, alone or beside other texts that take a share of it."""
    texts = ["The mill stands by a river. " * 8, "water", "A river and a wheel. " * 9]

    def vectors(budget: int, texts: list[str]) -> list[list[float]]:
        llm = LLM(decoder, backend="native", threads=1, max_num_batched_tokens=budget)
        made = [one.values for one in llm.embed(texts, pooling=pooling)]
        llm.close()
        return made

    whole = vectors(2048, texts)
    for budget in (100, 64, 33, 7):
        assert vectors(budget, texts) == whole
    assert [vectors(2048, [text])[0] for text in texts] == whole


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_chunks_that_are_summed_apart_would_differ(decoder: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each chunk is summed by itself, and the sums are added."""
    more: dict[str, Any] = {"backend": "native", "threads": 1} if backend == "native" else EXACT
    text = "The mill stands by a river. " * 8

    def apart(before: tuple[float, ...], rows: np.ndarray) -> tuple[float, ...]:
        total = np.asarray(add_rows((), rows), np.float32)
        return tuple((np.array(before, np.float32) + total if before else total).tolist())

    monkeypatch.setattr("headrace.runner.runner.add_rows", apart)
    made = []
    for budget in (2048, 33):
        llm = LLM(decoder, **more, max_num_batched_tokens=budget)
        made += [one.values for one in llm.embed(text, pooling="mean")]
        llm.close()
    assert made[0] != made[1]


def test_the_sum_of_rows_is_one_fold() -> None:
    """Cut anywhere, rows whose float64 sum does depend on the order of additions."""
    rows = np.random.default_rng(3).normal(size=(57, 5)) * np.logspace(-9, 9, 57)[:, None]
    whole = add_rows((), rows)
    for cut in range(58):
        assert add_rows(add_rows((), rows[:cut]), rows[cut:]) == whole
    assert add_rows((), rows[::-1]) != whole


def test_a_preempted_mean_counts_every_row_once(decoder: Path) -> None:
    text = "The mill stands by a river and the wheel is turning. " * 2
    whole = LLM(decoder, **EXACT)
    (expected,) = whole.embed(text, pooling="mean")
    assert 50 < len(expected.token_ids) < 70
    tight = LLM(decoder, **EXACT, max_num_batched_tokens=3, max_model_len=128, kv_cache_memory=128 * 512)  # 8 blocks
    long = SamplingParams(max_tokens=60, ignore_eos=True, priority=-1)
    answers = [tight.add("The mill", long), tight.add("A river", long)]
    (got,) = tight.embed(text, pooling="mean")
    assert tight.engine.scheduler.preemptions > 0, "the pool was meant to run short"
    assert np.abs(np.array(got.values) - expected.values).max() < 1e-9
    while not all(answer.finished for answer in answers):
        tight.step()
    tight.engine.check()


def test_the_native_core_pools_like_torch(decoder: Path) -> None:
    texts = ["The mill stands by a river. " * 6, "water"]
    exact, native = LLM(decoder, **EXACT), LLM(decoder, backend="native", threads=1, max_num_batched_tokens=16)
    for pooling in ("mean", "last"):
        for a, b in zip(exact.embed(texts, pooling=pooling), native.embed(texts, pooling=pooling), strict=True):
            assert cosine(a.values, b.values) > 0.999  # the native core keeps these weights as bfloat16
    with pytest.raises(AdmissionError, match="pool mean or last"):
        native.embed("water", pooling="first")
    with pytest.raises(AdmissionError, match="unknown pooling"):
        native.embed("water", pooling="most")
    with pytest.raises(ValueError, match="dimensions must be 1 to 32"):
        native.embed("water", dimensions=33)
    kept, whole = (native.embed("water", dimensions=many)[0].values for many in (8, None))
    assert kept == pytest.approx(np.array(whole[:8]) / np.linalg.norm(whole[:8]))


def test_the_command(bert: Path, shell: Shell) -> None:
    code, out, err = shell("embed", bert, "the mill", "a wheel")
    assert code == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["text"] for line in lines] == ["the mill", "a wheel"]
    assert [line["tokens"] for line in lines] == [4, 4]
    assert all(len(line["embedding"]) == HIDDEN for line in lines)
    assert "there is no text" in shell("embed", bert)[2]
