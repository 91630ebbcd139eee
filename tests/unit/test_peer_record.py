"""Shares of the limit, and the record of speeds next to other engines with its tables."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import record
from benchmarks.peers.limits import Limit, Work, attention_products, limit_of, share_of, work_of
from headrace.bench.interleave import CELLS, Cell
from headrace.startup.opening import open_model
from tests.tiny import tiny_config
from tests.tiny_files import write_tiny_gguf

CONFIG = tiny_config()
MACHINE = {"bandwidth_gb_s": 1.0, "gmacs": {"int8": 10.0, "bf16": 5.0}}
WORK = Work(weight_bytes=2e9, layer_products=1e9, head_products=1e8)


def result(model: str = "a.gguf", ratio: float = 1.5) -> dict[str, Any]:
    """A measurement of one cell with an engine, and of one cell without."""
    peers = {"ort": {"tokens_per_s": 10.0, "setting": "int4"}, "llama.cpp": {"tokens_per_s": 4.0, "setting": "x"}}
    figures = {"tokens_per_s": 15.04, "bandwidth_gb_s": 20.0, "others_cpu": 0.01, "limit": "memory", "share": 0.9}
    judged = {"peers": peers, "best_peer": "ort", "ratio": ratio, "interval": [1.4, 1.61]}
    return {
        "model": model,
        "machine": {"cpu": "Some CPU"},
        "commit": "abc",
        "rounds": 5,
        "threads": 2,
        "limits": {"isa": "avx2"},
        "engines": {"headrace": {"about": "Headrace"}, "ort (int4)": {"about": "ORT 1"}},
        "cells": {"b1": figures | judged, "b2": figures | {"peers": {}}},
    }


def test_the_work_of_a_file_is_that_of_its_matrices(tmp_path: Path) -> None:
    opened = open_model(write_tiny_gguf(tmp_path / "tiny.gguf"))
    config, layer = opened.config, opened.config.layers[0]
    work = work_of(opened)
    of_layer = config.hidden_size * (2 * layer.q_size + 2 * layer.kv_size + 3 * layer.ffn)
    norms = config.num_layers * config.hidden_size * 8  # at most
    assert len(config.layers) * of_layer <= work.layer_products <= len(config.layers) * of_layer + norms
    assert work.head_products == config.vocab_size * config.hidden_size
    assert work.weight_bytes > 0
    opened.source.close()


def test_attention_sees_each_position_and_those_before_it() -> None:
    layers = [replace(CONFIG.layers[0], window=window) for window in (None, 3)]
    config = replace(CONFIG, layers=tuple(layers))
    width = 2 * layers[0].q_size
    assert attention_products(config, 0, 4) == width * (1 + 2 + 3 + 4) + width * (1 + 2 + 3 + 3)
    assert attention_products(config, 9, 10) == width * 10 + width * 3


def test_a_prompt_is_limited_by_products_and_a_single_row_by_memory() -> None:
    prompt, one, many = CELLS["pp512"], CELLS["b1"], Cell("b99", 99, 128, 32)
    attention = attention_products(CONFIG, 0, 512) / 5e9
    limit = limit_of(prompt, WORK, CONFIG, MACHINE)
    assert limit == Limit("products", pytest.approx((512 * 1e9 + 1e8) / 10e9 + attention))
    assert limit_of(one, WORK, CONFIG, MACHINE).name == "memory"
    assert limit_of(one, WORK, CONFIG, MACHINE).seconds >= 2.0
    assert limit_of(many, WORK, CONFIG, MACHINE).name == "products"
    assert share_of(prompt, 512 / limit.seconds, limit) == pytest.approx(1.0)
    assert share_of(many, 99 / 4, Limit("memory", 2.0)) == pytest.approx(0.5)


def test_a_record_keeps_cells_and_replaces_those_of_the_same_machine(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    record.keep(file, "Zen 4", result())
    (run,) = record.read(file)
    assert (run["machine"], run["isa"], run["model"], run["cpu"]) == ("Zen 4", "avx2", "a.gguf", "Some CPU")
    assert list(run["cells"]) == ["b1"]  # b2 has no other engine
    assert (run["cells"]["b1"]["peer"], run["cells"]["b1"]["setting"]) == ("ort", "int4")
    record.keep(file, "Zen 4", result(ratio=0.8))
    record.keep(file, "Zen 5", result())
    record.keep(file, "Zen 4", result("b.gguf"))
    ratios = [(run["machine"], run["model"], run["cells"]["b1"]["ratio"]) for run in record.read(file)]
    assert ratios == [("Zen 4", "a.gguf", 0.8), ("Zen 5", "a.gguf", 1.5), ("Zen 4", "b.gguf", 1.5)]


def test_the_tables_show_the_record(tmp_path: Path) -> None:
    file = tmp_path / "speed.json"
    record.keep(file, "Zen 4", result(ratio=0.8))
    runs = record.read(file)
    text = record.tables(runs)
    assert "**a, Zen 4, avx2**: Some CPU, 2 threads" in text
    assert "| batch 1 | 15.0 | ort (int4) | 10.0 | **0.80** | 1.40–1.61 | 90% memory |" in text
    assert record.short_table(runs=runs).splitlines()[-1].endswith("| – | – | 0.80 | – | – | – | – | – |")
    other = copy.deepcopy(runs)
    other[0]["cells"]["b1"]["ratio"] = 0.9
    assert record.tables(other) != text


def test_the_recorded_speeds_are_complete() -> None:
    for run in record.read():
        for cell, figures in run["cells"].items():
            assert cell in CELLS
            assert figures["interval"][0] <= figures["ratio"] <= figures["interval"][1]
            # Caches may hold a part of a small model's weights; no product is faster than the peak.
            assert 0 < figures["share"] < {"memory": 1.25, "products": 1.0}[figures["limit"]]
    assert json.loads(record.RECORD.read_text()) == record.read()
