"""Encoders and rerankers in GGUF next to llama.cpp: rows after the last layer, and scores."""

import json
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.llm import LLM
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.gguf_writer import write_gguf
from tests.models.test_encoders import DOUBLE, IN_GGUF, PROMPTS, final_rows, oracle
from tests.models.zoo import largest_gap
from tests.models.zoo import oracle as decoder
from tests.places import peer_python
from tests.tiny_rerankers import write_answering, write_cross_encoder, write_gguf_answering, write_gguf_cross_encoder

PAGE = Path(__file__).resolve().parents[2] / "docs" / "en" / "reference" / "models.md"
# llama.cpp takes GELU from a table of float16.
ROWS, LOGITS = 1e-2, 5e-3
QUERY, DOCUMENTS = "the water wheel", ["the mill stands by a river", "a wheel", "water turns the wheel, the mills turned", "by"]


def of_llama_cpp(folder: Path, wanted: dict[Path, tuple[list[list[int]], bool]]) -> dict[str, list[np.ndarray]]:
    """Arrays of llama.cpp by a file's name without its ending; a file that it does not open is missing."""
    names = {str(path): {"tokens": tokens, "rank": rank} for path, (tokens, rank) in wanted.items()}
    (folder / "names.json").write_text(json.dumps(names))
    script = Path(__file__).with_name("llama_cpp_embeddings.py")
    subprocess.run([peer_python("llama_cpp"), str(script), str(folder / "names.json")], check=True, timeout=600)
    arrays = {}
    for path in wanted:
        if path.with_suffix(".npz").exists():
            with np.load(path.with_suffix(".npz")) as stored:
                arrays[path.stem] = [stored[str(i)] for i in range(len(stored.files))]
    return arrays


def torch_rows(arrays: list[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(rows.astype(np.float64)) for rows in arrays]


@pytest.mark.peers
def test_rows_of_gguf_encoders_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """Control: rows of the positions before are far away."""
    paths = {name: write_gguf(oracle(name), tmp_path / f"{name}.gguf") for name in IN_GGUF}
    theirs = of_llama_cpp(tmp_path, dict.fromkeys(paths.values(), (PROMPTS, False)))
    assert set(theirs) == set(IN_GGUF)
    gaps = {}
    for name, path in paths.items():
        ours = final_rows(load_model(GGUFFile(path), DOUBLE))
        gaps[name] = largest_gap(ours, torch_rows(theirs[name]))
        assert largest_gap([rows.roll(1, 0) for rows in ours], torch_rows(theirs[name])) > 100 * ROWS
    print({name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert {name: gap for name, gap in gaps.items() if gap > ROWS} == {}


@pytest.mark.peers
def test_a_qwen3_embedding_equals_that_of_llama_cpp(tmp_path: Path) -> None:
    """Rows after the last norm of a causal decoder."""
    path = write_gguf(decoder("qwen3"), tmp_path / "qwen3.gguf")
    theirs = of_llama_cpp(tmp_path, {path: (PROMPTS, False)})
    assert largest_gap(final_rows(load_model(GGUFFile(path), DOUBLE)), torch_rows(theirs["qwen3"])) <= 1e-4


@pytest.mark.peers
def test_scores_of_gguf_rerankers_equal_those_of_llama_cpp(tmp_path: Path) -> None:
    """The tokens of each pair are ours; the head, its pooling and its activation are compared."""
    paths, scores, wanted = {}, {}, {}
    for name, pooling in (("xlm-roberta", None), ("modernbert", 2), ("modernbert-mean", None)):
        model = write_cross_encoder(tmp_path / name, name)
        paths[name] = write_gguf_cross_encoder(model, tmp_path / f"{name}.gguf", pooling=pooling)
    answering = write_answering(tmp_path / "qwen3")
    paths["qwen3"] = write_gguf_answering(answering, tmp_path / "qwen3", tmp_path / "qwen3.gguf")
    for name, path in paths.items():
        with LLM(path, backend="torch", dtype="float64", threads=1, device="cpu") as llm:
            ranked = llm.rank(QUERY, DOCUMENTS)
        scores[name] = [one.score for one in ranked]
        wanted[path] = ([list(one.token_ids) for one in ranked], True)
    theirs = of_llama_cpp(tmp_path, wanted)
    assert set(theirs) == set(paths)
    gaps = {}
    for name, arrays in theirs.items():
        # llama.cpp applies the softmax of Qwen3's two labels, and leaves the sigmoid of one label to its caller.
        made = [float(np.log(row[0]) - np.log(row[1])) if name == "qwen3" else float(row[0]) for row in arrays]
        ours = [math.log(score / (1 - score)) for score in scores[name]]
        gaps[name] = max(abs(one - other) for one, other in zip(made, ours, strict=True))
        assert max(ours) - min(ours) > 20 * LOGITS, "the documents differ"
    print({name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert {name: gap for name, gap in gaps.items() if gap > LOGITS} == {}


def test_the_page_says_that_these_encoders_were_compared_with_llama_cpp() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.endswith(("oracle + llama.cpp |", "real weights |"))]
    assert [name for name in IN_GGUF if not any(line.startswith(f"| `{name}` |") for line in rows)] == []
