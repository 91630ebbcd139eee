"""Decoding methods and the features they refuse in docs/en/reference/composition.md: each pair is tried with tiny models."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headrace.data.explicit import params_of
from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.decoding.methods import strategy_for
from headrace.decoding.processors import LengthNudge
from headrace.drafting.speculation import Speculation
from headrace.llm import LLM
from headrace.workflows.cascade import Tier, answer
from tests.early_exits import write_exits
from tests.pages import item, wrapped
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

MASK = 3
SOURCE = "a source (encoder-decoders)"
PROPAGATED, QUERY = "early exit, propagated", "query cascade"

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampling": {"seed": 1},
    "n > 1": {"seed": 1, "n": 2},
    "best_of": {"seed": 1, "best_of": 2},
    "beams": {"beam_width": 2},
    "diverse beams": {"beam_width": 2, "beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "contrastive decoding": {"contrastive_beta": 0.5, "contrastive_alpha": 1e-4, "temperature": 0.0},
    "speculative cascade": {"defer_rule": "opt", "seed": 1},
    "blocks filled in": {"refine_block": 4},
    "early exit": {"exit_threshold": 0.02, "temperature": 0.0},
    PROPAGATED: {"exit_threshold": 0.02, "temperature": 0.0},
    "token cascade": {"cascade_threshold": 0.02, "temperature": 0.0},
    QUERY: {"temperature": 0.0},
}
FEATURES: dict[str, dict[str, Any]] = {
    "several answers": {"n": 2},
    "stop strings": {"stop": ["zz"]},
    "`stop_token_ids`": {"stop_token_ids": [5]},
    "`min_tokens`": {"min_tokens": 2},
    "`logprobs`": {"logprobs": 1},
    "`prompt_logprobs`": {"prompt_logprobs": 1},
    "`structured_outputs`": {"structured_outputs": {"regex": "(.|\\n)+"}},
    "`logit_bias`": {"logit_bias": {5: 1.0}},
    "`allowed_token_ids`": {"allowed_token_ids": list(range(4, 250))},
    "`bad_words`": {"bad_words": [[5]]},
    "`repetition_penalty`": {"repetition_penalty": 1.2},
    "`frequency_penalty`": {"frequency_penalty": 0.5},
    "`no_repeat_ngram`": {"no_repeat_ngram": 2},
    "DRY": {"dry_multiplier": 0.8},
    "`temperature`": {"temperature": 0.7},
    "`top_p`": {"top_p": 0.9},
    "top-n-sigma": {"top_n_sigma": 1.0},
    "XTC": {"xtc_probability": 0.5},
    "mirostat": {"mirostat_tau": 5.0},
    "an amateur's contrast": {"contrastive_beta": 0.5, "contrastive_alpha": 1e-4},
    "an amateur's cascade": {"defer_rule": "chow"},
    "early exit": {"exit_threshold": 0.5},
    "a smaller model's cascade": {"cascade_threshold": 0.5},
    "logit processors": {"processors": (LengthNudge(end_id=0, start=1),)},
}


@dataclass(frozen=True, slots=True)
class Models:
    """A model with an amateur and an exit, the same with propagated exits, and one with a smaller model."""

    plain: LLM
    propagating: LLM
    cascading: LLM

    def of(self, name: str, fields: dict[str, Any]) -> LLM:
        """The model that has what a method and a feature need."""
        if "cascade_threshold" in fields:
            return self.cascading
        return self.propagating if name == PROPAGATED else self.plain

    def close(self) -> None:
        for llm in (self.plain, self.propagating, self.cascading):
            llm.close()


def table(decoders: Models, sources: Models) -> str:
    """For each method the features that it refuses, with the message, in Markdown, of models that `opened` returns."""

    def message(name: str, llm: LLM, feature: dict[str, Any]) -> str:
        found = refusal(llm, METHODS[name], feature, through_tiers if name == QUERY else straight)
        field = next(iter(feature), "")
        return found.replace(field, "…") if len(field) > 3 else found  # one message for all fields

    methods: dict[str, list[str]] = {}  # refusals: the methods that have them
    for name, method in METHODS.items():
        refused: dict[str, list[str]] = {}
        for title, feature in FEATURES.items():
            if name == QUERY and "processors" in feature:
                continue  # `answer` has no such argument
            if found := message(name, decoders.of(name, {**method, **feature}), feature):
                refused.setdefault(found, []).append(title)
        if found := message(name, sources.of(name, method), {}):
            refused.setdefault(found, []).append(SOURCE)
        silent = [] if name != QUERY and strategy_for(params_of(method)).streams else ["no streaming"]
        silent += [] if speculates(params_of(method)) else ["no optional drafts"]
        lines = [f"* {'; '.join(silent)}"] if silent else []
        lines += [item(", ".join(titles), f"“{found}”") for found, titles in refused.items()]
        methods.setdefault("\n".join(lines), []).append(name)
    tried = wrapped(f"Tried with each method: {', '.join([*FEATURES, SOURCE])}, streaming, optional drafts.")
    return "\n\n".join([tried, *(f"## {', '.join(names)}\n\n{lines or '* all run'}" for lines, names in methods.items())])


def speculates(params: SamplingParams) -> bool:
    """Whether a request's sequences may carry drafts."""
    request: Any = SimpleNamespace(strategy=strategy_for(params), params=params, processors=())
    return Speculation([], 256).serves(request)


Way = Callable[[LLM, str, SamplingParams, Any], RequestOutput]


def straight(llm: LLM, prompt: str, params: SamplingParams, processors: Any) -> RequestOutput:
    return llm.generate(prompt, params, processors=processors)[0]


def through_tiers(llm: LLM, prompt: str, params: SamplingParams, processors: Any) -> RequestOutput:
    """The answer of a cascade whose first model is never confident enough, so that both run."""
    return answer([Tier(llm, 1.01), Tier(llm)], [prompt], params)[0].output


def refusal(llm: LLM, method: dict[str, Any], feature: dict[str, Any], way: Way = straight) -> str:
    """Message with which the pair is refused; empty if it runs. Raises any other error."""
    fields = {"max_tokens": 4, **method, **feature}
    processors = fields.pop("processors", ())
    try:
        output = way(llm, "The mill", params_of(fields), processors)
    except ValueError as error:
        return str(error)
    assert output.error is None, (fields, output.error)
    assert output.finished
    return ""


def opened(folder: Path, **settings: Any) -> tuple[Models, Models]:
    """Decoders and encoder-decoders, tiny, with a mask token."""
    decoder, translator = write_tiny_gguf(folder / "tiny.gguf", mask=MASK), write_tiny_marian(folder / "marian")
    config = json.loads((translator / "config.json").read_text())
    (translator / "config.json").write_text(json.dumps({**config, "mask_token_id": MASK}))
    return _models(decoder, **settings), _models(translator, **settings)


def _models(path: Path, **settings: Any) -> Models:
    exits, given = write_exits(path.with_name(f"{path.stem}-exits"), path), {"threads": 1, "device": "cpu", **settings}
    return Models(
        LLM(path, amateur=path, exits=exits, **given),
        LLM(path, amateur=path, exits=exits, exit_state="propagate", **given),
        LLM(path, cascade=path, **given),
    )


def text() -> str:
    with tempfile.TemporaryDirectory() as folder:
        return table(*opened(Path(folder), backend="torch", dtype="float64"))
