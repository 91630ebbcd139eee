"""Tiny models of every kind for a soak, with requests and what they give offline: tokens that leave early (both exit states, an
encoder-decoder's too), a cascade by token, one by name, classes of texts."""

from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.runner.classifier import ExitClassifiers
from headrace.startup.classifier import ClassifierThreshold, save
from headrace.startup.opening import open_model
from headrace.workflows.cascade import Tier, answer
from tests.early_exits import write_exits
from tests.server.harness import ENGINE
from tests.tiny_bert import HIDDEN, LAYERS, write_tiny_bert
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

PROMPTS = [f"The mill {'by the stream ' * n}stands" for n in range(6)]
SOURCES = ["a dog runs on the grass .", "un chien court sur l' herbe .", "la la la", "the dog ."]
POOL = {"kv_cache_memory": "96KiB"}  # for one or two requests at a time
SURE = 0.02  # a probability that a tiny model reaches now and then


def every_kind(folder: Path) -> dict[str, Any]:
    """Fields of a Soak: models, cascades, jobs, writers. Files go to the folder."""
    tiny, large = (write_tiny_gguf(folder / f"{name}.gguf", seed=seed) for seed, name in enumerate(("tiny", "large")))
    smaller = write_tiny_gguf(folder / "smaller.gguf", layers=1, seed=3)
    marian, bert = write_tiny_marian(folder / "marian"), write_tiny_bert(folder / "bert")
    exits = {"exits": str(write_exits(folder / "exits", tiny)), **POOL}
    models = [
        ("tiny", str(tiny), {"cascade": str(smaller), "kv_cache_memory": "192KiB"}),  # room for several answers to a chat
        ("large", str(large), POOL),
        ("deferred", str(tiny), exits),
        ("propagated", str(tiny), {**exits, "exit_state": "propagate"}),
        ("marian", str(marian), {"exits": str(write_exits(folder / "marian-exits", marian, 2)), "kv_cache_memory": "192KiB"}),
        ("bert", str(bert), {"classifier": str(_classifier(folder / "classifier", bert))}),
    ]
    by_name = {name: (model, settings) for name, model, settings in models}
    leaves, by_token = {"exit_threshold": SURE}, {"cascade_threshold": SURE}
    jobs = [
        *_texts("by token", "tiny", by_name, PROMPTS, by_token),
        *_texts("deferred", "deferred", by_name, PROMPTS, leaves),
        *_texts("propagated", "propagated", by_name, PROMPTS, leaves),
        *_texts("sources", "marian", by_name, SOURCES, leaves),
        *_classes(by_name["bert"]),
    ]
    threshold, settled = _settled(by_name)
    writers = [{"model": "tiny", **by_token}, {"model": "both"}, {"model": "marian", "max_tokens": 60, **leaves}]
    writers += [{"model": name, **leaves} for name in ("deferred", "propagated")]
    return {
        "models": models, "cascades": [("both", ("tiny", "large"), (threshold,))], "jobs": jobs + settled, "writers": writers
    }  # fmt: skip


def _texts(kind: str, name: str, models: dict[str, Any], prompts: list[str], early: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy and sampled; some of their tokens leave, or are the smaller model's, and some are not."""
    model, settings = models[name]
    made, depths = [], set()
    with LLM(model, **ENGINE, **settings) as llm:
        for number, prompt in enumerate(prompts):
            how = {"temperature": 0.0} if number % 2 else {"temperature": 0.9, "seed": number}
            given = {"top_p": 1.0, "max_tokens": 12 + 4 * number, **how, **early}
            (output,) = llm.generate(prompt, llm.default_params(**given))
            depths |= {one.layers for one in output.outputs[0].exits or ()}
            made.append(_job(kind, "/v1/completions", {"model": name, "prompt": prompt, **given}, output.outputs[0].text))
    assert len(depths) == 2, f"{kind}: all tokens were written after {depths} layers"
    return made


def _settled(models: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """A threshold that about half of the answers reach, and what the cascade of that threshold answers."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    asked = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 12}
    (tiny, settings), (large, others) = models["tiny"], models["large"]
    with LLM(tiny, **ENGINE, **settings) as first, LLM(large, **ENGINE, **others) as second:
        scores = sorted(one.scores[0] for one in answer([Tier(first), Tier(second)], PROMPTS, params))
        threshold = scores[len(scores) // 2]
        found = answer([Tier(first, threshold), Tier(second)], PROMPTS, params)
    assert {one.tier for one in found} == {0, 1}
    pairs = zip(PROMPTS, found, strict=True)
    bodies = [({"model": "both", "prompt": prompt, **asked}, one.output.outputs[0].text) for prompt, one in pairs]
    return threshold, [_job("by name", "/v1/completions", body, text) for body, text in bodies]


def _classes(given: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """About half of the texts leave by the first exit."""
    model, settings = given
    texts = [f"the {word} stands by a river {'wheel ' * n}" for n, word in enumerate(("mill", "water", "wheel", "turn"))]
    with LLM(model, **ENGINE, **settings) as llm:
        first = sorted(one.votes[0].probability for one in llm.classify(texts, criterion="off"))
        rule: dict[str, Any] = {"criterion": "max_prob", "threshold": first[len(first) // 2]}
        made = [[one.label, one.layers] for one in llm.classify(texts, **rule)]
    assert len({layers for _, layers in made}) > 1
    return [_job("classes", "/v1/classify", {"model": "bert", "input": texts, **rule}, made)]


def _classifier(folder: Path, bert: Path) -> Path:
    """Of random weights."""
    rng = np.random.default_rng(3)
    weight, bias = rng.normal(size=(LAYERS, 3, HIDDEN)) * 0.3, rng.normal(size=(LAYERS, 3)) * 0.1
    rules = [ClassifierThreshold("max_prob", 0.5, 0.1, 0.05, "hb", 100, 0.02, 2.0)]
    save(folder, ExitClassifiers((1, 2, 3), ("bad", "fine", "good"), "mean", weight, bias), open_model(bert), {}, rules)
    return folder


def _job(kind: str, path: str, body: dict[str, Any], says: Any) -> dict[str, Any]:
    return {"kind": kind, "path": path, "body": body, "says": says}
