"""Encoders equal `transformers` in float64 from both kinds of files, and every number of a family matters."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import core
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.models.registry import read_config
from headrace.ops.context import FeedRows, build
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model, read_tensor, stored_tensors
from headrace.weights.source import WeightError
from tests.models.gguf_writer import write_gguf
from tests.models.rotary_rows import reordered
from tests.models.zoo import (
    HEADS,
    SMALL,
    VOCAB,
    MemorySource,
    draw_weights,
    hf_source,
    in_float64,
    largest_gap,
    prompts,
)
from tests.tiny_bert import write_tiny_bert

DOUBLE = torch.float64
EXACT, SEEN = 1e-10, 1e-3
BLOCK = 4
PROMPTS = [[token % (VOCAB - 4) + 4 for token in each] for each in prompts(7, (3, 17, 40))]
PADDED = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}


def _bert(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**{**SMALL, "num_attention_heads": 4, **changes})


def _modern(**changes: Any) -> Any:
    ropes = {"full_attention": {**LOCAL, "rope_theta": 1000.0}, "sliding_attention": LOCAL}
    settings = {**SMALL, **PADDED, "num_attention_heads": 4, "num_hidden_layers": 5, "local_attention": 8}
    return transformers.ModernBertConfig(
        **{**settings, "rope_parameters": ropes, "cls_token_id": 0, "sep_token_id": 2, **changes}
    )


def _gemma(**changes: Any) -> Any:
    settings = {**SMALL, **HEADS, "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
    return transformers.Gemma3TextConfig(**{**settings, "use_bidirectional_attention": True, **changes})


ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: _bert("Bert", layer_norm_eps=2.0**-7),
    "roberta": lambda: _bert("Roberta", **PADDED),
    "xlm-roberta": lambda: _bert("XLMRoberta", **PADDED, type_vocab_size=1, layer_norm_eps=1e-5),
    "camembert": lambda: _bert("Camembert", **PADDED),
    "mpnet": lambda: _bert("MPNet", **PADDED),
    "modernbert": _modern,
    "modernbert-biases": lambda: _modern(attention_bias=True, mlp_bias=True),
    "gemma-embedding": _gemma,
}
ROTARY_ENCODERS = ("modernbert", "gemma-embedding")
IN_GGUF = ("bert", "xlm-roberta", "modernbert", "gemma-embedding")


def oracle(name: str) -> Any:
    """An encoder of `transformers` in float64."""
    config = ENCODERS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).to(DOUBLE).eval()
    draw_weights(model, 0.0 if name.startswith("gemma") else 1.0)
    return model


@torch.no_grad()
def rows_of(theirs: Any) -> list[torch.Tensor]:
    """Rows [tokens, width] after the last layer, by prompt."""
    return [theirs(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def models(name: str) -> tuple[Any, list[torch.Tensor]]:
    with in_float64():
        theirs = oracle(name)
        return theirs, rows_of(theirs)


@torch.no_grad()
def final_rows(model: Model) -> list[torch.Tensor]:
    """The same of a model of Headrace, all prompts in one step."""
    tables, start = [], 0
    for prompt in PROMPTS:
        tables.append(list(range(start, start + -(-len(prompt) // BLOCK))))
        start += len(tables[-1])
    pool = KVPool(model.config, start, BLOCK, DOUBLE)
    pool.data.fill_(torch.nan)
    ctx = build(pool, [FeedRows(prompt, table) for prompt, table in zip(PROMPTS, tables, strict=True)])
    x = model.embed(ctx)
    for i in range(model.config.num_layers):
        x = model.layer(i, x, ctx)
    return list(model.final(x).split([len(prompt) for prompt in PROMPTS]))


def gap(source: Any, expected: list[torch.Tensor]) -> float:
    return largest_gap(final_rows(load_model(source, DOUBLE)), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_equal_transformers_and_export_is_the_inverse(name: str, tmp_path: Path) -> None:
    theirs, expected = models(name)
    sources: list[Any] = [hf_source(theirs)]
    if name in IN_GGUF:
        sources.append(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf")))
    for source in sources:
        assert read_config(source).encoder
        assert gap(source, expected) <= EXACT, source.format
        for tensor, values in stored_tensors(load_model(source, DOUBLE), source.format).items():
            stored = read_tensor(source, tensor if tensor in source.names() else tensor.partition(".")[2], DOUBLE)
            if "position_embeddings" in tensor and name not in ("bert",):
                values[:2] = stored[:2]  # rows for padding
            torch.testing.assert_close(values, stored, rtol=0, atol=1e-15)


# A number of a family, and its value for models without it.
NEUTRAL: dict[str, dict[str, Any]] = {
    "bert": {"layer_norm_eps": 1e-12},
    "roberta": {"layer_norm_eps": 0.05},
    "xlm-roberta": {"layer_norm_eps": 0.05},
    "camembert": {"layer_norm_eps": 0.05},
    "mpnet": {"relative_attention_num_buckets": 16, "layer_norm_eps": 0.05},
    "modernbert": {
        "local_attention": 512,
        "layer_types": ["full_attention"] * 5,
        "rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL},
        "norm_eps": 0.01,
    },
    "gemma-embedding": {
        "use_bidirectional_attention": False,
        "sliding_window": 512,
        "layer_types": ["full_attention"] * 7,
        "query_pre_attn_scalar": 16,
    },
}
# The same of GGUF metadata, without the architecture.
GGUF_NEUTRAL: dict[str, dict[str, Any]] = {
    "bert": {"attention.layer_norm_epsilon": 1e-12},
    "xlm-roberta": {"attention.layer_norm_epsilon": 0.05},
    "modernbert": {
        "attention.layer_norm_epsilon": 0.01,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 100.0,
        "rope.freq_base_swa": 1000.0,
    },
    "gemma-embedding": {
        "attention.layer_norm_rms_epsilon": 0.01,
        "attention.sliding_window": 512,
        "rope.freq_base": 10000.0,
    },
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_number_is_seen(name: str) -> None:
    theirs, expected = models(name)
    source, gaps = hf_source(theirs), {}
    for key, value in NEUTRAL[name].items():
        tensors = dict(source.tensors)
        if key == "relative_attention_num_buckets":
            tensors["encoder.relative_attention_bias.weight"] = tensors["encoder.relative_attention_bias.weight"][:value]
        gaps[key] = gap(MemorySource("safetensors", tensors, {**source.config, key: value}), expected)
    assert {key: found for key, found in gaps.items() if not found > SEEN} == {}


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_neutral_number_of_metadata_is_seen(name: str, tmp_path: Path) -> None:
    theirs, expected = models(name)
    file = GGUFFile(write_gguf(theirs, tmp_path / "model.gguf"))
    tensors, prefix = {key: read_tensor(file, key) for key in file.names()}, file.metadata["general.architecture"]
    gaps = {
        key: gap(MemorySource("gguf", tensors, {**file.metadata, f"{prefix}.{key}": value}), expected)
        for key, value in GGUF_NEUTRAL[name].items()
    }
    assert {key: found for key, found in gaps.items() if not found > SEEN} == {}


@pytest.mark.parametrize("by", [-1, 1])
def test_positions_off_by_one_are_seen(by: int) -> None:
    theirs, expected = models("xlm-roberta")
    source, name = hf_source(theirs), "embeddings.position_embeddings.weight"
    source.tensors[name] = source.tensors[name].roll(by, 0)
    assert gap(source, expected) > SEEN


def test_a_missing_first_norm_and_other_gates_are_seen() -> None:
    """Controls of ModernBERT: gate and up change places; the rows of q and k do."""
    theirs, expected = models("modernbert")
    source = hf_source(theirs)
    for name, size in (("layers.1.mlp.Wi.weight", 112), ("layers.1.attn.Wqkv.weight", 64)):
        rows = source.tensors[name]
        swapped = torch.cat([rows[size : 2 * size], rows[:size], rows[2 * size :]])
        assert gap(MemorySource("safetensors", {**source.tensors, name: swapped}, source.config), expected) > SEEN


@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", ROTARY_ENCODERS)
def test_other_orders_of_rotary_rows_are_seen(name: str, container: str, tmp_path: Path) -> None:
    """Negative control: q and k with halves for pairs, or pairs for halves, fit every shape and give other rows."""
    theirs, expected = models(name)
    source: Any = hf_source(theirs)
    if container == "gguf":
        file = GGUFFile(write_gguf(theirs, tmp_path / "model.gguf"))
        source = MemorySource("gguf", {key: read_tensor(file, key) for key in file.names()}, dict(file.metadata))
    for pairs in (True, False):
        tensors = reordered(source.tensors, read_config(source).layers[0], pairs)
        assert gap(MemorySource(container, tensors, source.config), expected) > SEEN


def test_the_second_type_begins_after_the_separator() -> None:
    """The token types of a pair, as transformers has them, and only if the config has a separator."""
    theirs = oracle("bert")
    expected = []
    for prompt in PROMPTS:
        at = prompt.index(separator) + 1 if (separator := PROMPTS[0][1]) in prompt else len(prompt)
        types = torch.tensor([[0] * at + [1] * (len(prompt) - at)])
        with in_float64(), torch.no_grad():
            expected.append(theirs(torch.tensor([prompt]), token_type_ids=types).last_hidden_state[0])
    source = hf_source(theirs)
    config = read_config(source)
    model = load_model(source, DOUBLE, config=replace(config, separator=PROMPTS[0][1]))
    assert largest_gap(final_rows(model), expected) <= EXACT
    assert largest_gap(final_rows(load_model(source, DOUBLE)), expected) > SEEN


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize("name", [name for name in ENCODERS if "-biases" not in name])
def test_the_native_core_is_close_and_gives_the_same_bits_in_any_batch(name: str, tmp_path: Path) -> None:
    theirs = oracle(name).to(torch.bfloat16)  # weights that the core holds unchanged
    write_tiny_bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tokenizer = (tmp_path / "tokenizer.json").read_bytes()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tokenizer)
    with in_float64():
        expected = [rows.mean(0) for rows in rows_of(theirs.to(DOUBLE))]
    with LLM(tmp_path, threads=2, backend="native") as llm:
        made = [one.values for one in llm.embed(PROMPTS, pooling="mean")]
        alone = [llm.embed([prompt], pooling="mean")[0].values for prompt in PROMPTS]
    assert alone == made
    for threads, copies in ((1, 3), (16, 11)):
        with LLM(tmp_path, threads=threads, backend="native") as llm:
            turned = [one.values for one in llm.embed(PROMPTS[::-1] * copies, pooling="mean")]
        assert turned == made[::-1] * copies
    for values, row in zip(made, expected, strict=True):
        assert float(np.dot(values, (row / row.norm()).numpy())) > 0.9999


def test_files_that_cannot_be_run_are_refused() -> None:
    for name, change, says in (
        ("xlm-roberta", {"pad_token_id": 0}, "must have pad_token_id 1"),
        ("mpnet", {"position_embedding_type": "relative_key"}, "relative positions, which mpnet"),
        ("modernbert", {"norm_bias": True}, "asks for norm_bias"),
        ("modernbert", {"hidden_activation": "silu"}, "built with gelu"),
        ("modernbert", {"layer_types": ["full_attention"]}, "must have layer_types for its 5 layers"),
    ):
        config = ENCODERS[name]().to_dict() | change
        with pytest.raises(WeightError, match=says):
            read_config(MemorySource("safetensors", {}, config))
