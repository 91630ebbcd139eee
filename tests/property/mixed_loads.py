"""Random loads for whole engines: models with everything that may be opened next to them, and requests of every kind."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from headrace.data.params import BeamSearchParams, RefineParams, SamplingParams
from headrace.data.structured import StructuredOutputs
from headrace.decoding.processors import History
from headrace.runner.heads import Heads
from headrace.startup import heads as files
from headrace.startup.opening import open_model
from headrace.training.head_kinds import initial_tensors
from headrace.training.teacher import read_teacher
from tests.early_exits import write_exits
from tests.tiny_files import write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

MASK = 3  # the token that models fill in
IDS = range(4, 90)  # of prompts: every model has them
CONTEXT = {"decoder": 160, "source": 96}
FORMS = (
    {"regex": "[a-z ]{12}"},
    {"choice": ["the mill", "the river", "mud and stone"]},
    {
        "json": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
            "required": ["a", "b"],
        }
    },
)


FILTERS: tuple[dict[str, Any], ...] = (
    *({}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"mirostat_tau": 4.0}),
    {"xtc_probability": 0.5, "xtc_threshold": 0.01},
)


class Nudge:
    """A processor that makes one token likelier, another at each place."""

    scope = "path"

    def apply(self, logits: torch.Tensor, history: History, paths: list[list[int]]) -> torch.Tensor:
        for row, path in zip(logits, paths, strict=True):
            row[10 + (len(history.output) + len(path)) % 7] += 2.0
        return logits


class Files:
    """Tiny models in a folder, each written when it is needed first."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @cached_property
    def decoder(self) -> Path:
        return write_tiny_gguf(self.place / "decoder.gguf", layers=4, mask=MASK)

    @cached_property
    def smaller(self) -> Path:
        return write_tiny_gguf(self.place / "smaller.gguf", layers=2, mask=MASK, seed=5)

    @cached_property
    def source(self) -> Path:
        return write_tiny_marian(self.place / "source")

    @cached_property
    def exits(self) -> Path:
        return write_exits(self.place / "exits", self.decoder, 2)

    @cached_property
    def several_exits(self) -> Path:
        """Exits after each layer but the last."""
        return write_exits(self.place / "several_exits", self.decoder, 1, 2, 3)

    @cached_property
    def exits_of_some(self) -> Path:
        """Exits that choose from a part of the vocabulary."""
        return write_exits(self.place / "exits_of_some", self.decoder, 3, ids=IDS)

    @cached_property
    def heads(self) -> Path:
        return self._trained("heads")

    @cached_property
    def feature(self) -> Path:
        return self._trained("feature")

    def _trained(self, kind: str) -> Path:
        opened, folder = open_model(self.decoder), self.place / kind
        vocab = torch.arange(opened.config.vocab_size, dtype=torch.int32)
        tensors = initial_tensors(kind, read_teacher(opened, vocab.long()), 3)
        files.save(folder, Heads(kind, 3, tensors | {"vocab": vocab}), opened, {})
        return folder


def _chosen(*names: str, **settings: Any) -> Callable[[Files], dict[str, Any]]:
    """Settings of `LLM`; a name is role=file."""
    roles = dict(name.split("=") for name in names)
    return lambda files: {role: getattr(files, name) for role, name in roles.items()} | settings


Settings = Callable[[Files], dict[str, Any]]
SEVERAL, EXITS, AMATEUR, CASCADE, DRAFT = (
    "exits=several_exits",
    "exits=exits",
    "amateur=smaller",
    "cascade=smaller",
    "draft=smaller",
)
KINDS: dict[str, Settings] = {
    "exits": _chosen(EXITS, AMATEUR),
    "exits, auto": _chosen(EXITS, AMATEUR, speculate="auto"),
    "exits, draft": _chosen(EXITS, DRAFT, speculate="draft", draft_tokens=4),
    "exits, lookahead": _chosen(EXITS, AMATEUR, speculate="lookahead", draft_tokens=5),
    "exits, blocks": _chosen(EXITS, AMATEUR, speculate="blocks", draft_tokens=4),
    "exits of some tokens, suffix": _chosen("exits=exits_of_some", AMATEUR, speculate="suffix", draft_tokens=4),
    "several exits": _chosen(SEVERAL, AMATEUR, exit_layers="all"),
    "several exits, draft": _chosen(SEVERAL, DRAFT, exit_layers="all", speculate="draft", draft_tokens=4),
    "two exits, ngram": _chosen(SEVERAL, exit_layers="1,3", speculate="ngram", draft_tokens=3),
    "several exits, propagated": _chosen(SEVERAL, exit_layers="all", exit_state="propagate"),
    "propagated": _chosen(EXITS, AMATEUR, exit_state="propagate"),
    "propagated, ngram": _chosen(EXITS, exit_state="propagate", speculate="ngram", draft_tokens=3),
    "propagated, draft": _chosen(EXITS, DRAFT, exit_state="propagate", speculate="draft", draft_tokens=4),
    "propagated, some tokens, jacobi": _chosen(
        "exits=exits_of_some", exit_state="propagate", speculate="jacobi", draft_tokens=4
    ),
    "cascade": _chosen(CASCADE),
    "cascade, draft": _chosen(CASCADE, DRAFT, speculate="draft", draft_tokens=3),
    "cascade, suffix": _chosen(CASCADE, speculate="suffix", draft_tokens=5),
    "cascade, auto": _chosen(CASCADE, DRAFT, speculate="auto"),
    "amateur, draft": _chosen(AMATEUR, DRAFT, speculate="draft", draft_tokens=4),
    "amateur, heads": _chosen(AMATEUR, "draft=heads", draft_tokens=2),
    "amateur, feature heads": _chosen(AMATEUR, "draft=feature", draft_tokens=3),
    "amateur, exit that drafts": _chosen(AMATEUR, "draft=exits", draft_tokens=4),
    "source": _chosen(speculate="auto"),
    "source, ngram": _chosen(speculate="ngram", draft_tokens=3),
}
DRAFTERS = ("draft", "speculate", "draft_tokens")  # settings that an engine without drafts lacks


@dataclass(frozen=True)
class Job:
    """One request. `exact`: its output does not depend on drafts."""

    what: str
    prompt: list[int]
    params: SamplingParams
    processors: tuple[Any, ...] = ()

    @property
    def exact(self) -> bool:
        return not self.params.rejects


@dataclass
class Load:
    """An engine and the requests that it serves."""

    kind: str
    settings: dict[str, Any]
    model: str
    backend: str
    kv_dtype: str
    jobs: list[Job] = field(default_factory=list)


def make_load(seed: int, kinds: tuple[str, ...], files: Files, count: int, backend: str = "") -> Load:
    """A load for a seed: `count` requests for one of these kinds of engine."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    backend = backend or rng.choice(["native", "native", "native", "torch"])
    kv_dtype = rng.choice(["auto", "int8", "int4", "float32"]) if backend == "native" else "auto"
    model = "source" if kind.startswith("source") else "decoder"
    load = Load(kind, KINDS[kind](files), model, backend, kv_dtype)
    shared = rng.choices(IDS, k=60)
    while len(load.jobs) < count:
        try:
            load.jobs.append(_job(rng, load, shared))
        except ValueError:  # two settings that do not go together
            continue
    return load


def _job(rng: random.Random, load: Load, shared: list[int]) -> Job:
    prompt = shared[: rng.choice([0, 16, 17, 33, 48])] + rng.choices(IDS, k=rng.choice([1, 3, 15, 16, 20]))
    fields = _drawn(rng)
    early = _early(rng, load)
    makers = SOURCE_JOBS if load.model == "source" else JOBS
    what = rng.choice([name for name, (needs, _) in makers.items() if needs is None or needs in load.settings])
    made = makers[what][1](rng, fields, early, len(prompt))
    processors = (Nudge(),) if "processor" in what else ()
    return Job(what, prompt, made, processors)


def _drawn(rng: random.Random) -> dict[str, Any]:
    """Fields of a request that draws its tokens."""
    fields: dict[str, Any] = {
        "seed": rng.randrange(50),
        "max_tokens": rng.choice([3, 9, 17, 33]),
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0]),
        "ignore_eos": rng.random() < 0.7,
    }
    for chance, name, value in (
        (0.4, "logprobs", rng.choice([0, 2])),
        (0.25, "repetition_penalty", 1.3),
        (0.2, "frequency_penalty", 0.5),
        (0.2, "dry_multiplier", 0.9),
        (0.2, "no_repeat_ngram", 2),
        (0.2, "min_tokens", 2),
        (0.2, "stop_token_ids", tuple(rng.choices(IDS, k=20))),
        (0.15, "allowed_token_ids", tuple(range(4, 80))),
        (0.15, "bad_words", ((rng.choice(IDS),), (9, 10))),
    ):
        if rng.random() < chance:
            fields[name] = value
    if fields["temperature"] > 0:
        fields |= rng.choice(FILTERS)
    return fields


def _early(rng: random.Random, load: Load) -> dict[str, Any]:
    """Fields of a request that may exit early, or cascades."""
    if "exits" in load.settings:
        criterion = rng.choice(["max_prob", "margin", "saturation", "max_prob"])
        thresholds = [0.5, 0.8, 0.9, 0.95] if criterion == "saturation" else [0.0, 0.01, 0.02, 0.03, 0.05, 1.01]
        more = {"exit_decay": 3.0} if rng.random() < 0.2 else {}
        if "exit_layers" in load.settings and rng.random() < 0.3:
            more["exit_slope"] = 1.0
        return {"exit_threshold": rng.choice(thresholds), "exit_criterion": criterion, "exit_audit": rng.random() < 0.2, **more}
    if "cascade" in load.settings:
        criterion = rng.choice(["max_prob", "margin"])
        threshold = rng.choice([0.0, 0.01, 0.02, 0.03, 1.01])
        return {"cascade_threshold": threshold, "cascade_criterion": criterion, "cascade_audit": rng.random() < 0.2}
    return {}


Fields = dict[str, Any]
Make = Callable[[random.Random, Fields, Fields, int], SamplingParams]


def _held(rng: random.Random, fields: Fields) -> SamplingParams:
    """A request that is held to a form."""
    kept = {name: fields[name] for name in ("seed", "temperature")}
    return SamplingParams(**kept, max_tokens=40, structured_outputs=rng.choice(FORMS), n=rng.choice([1, 2]))


def _beams(width: int, most: int, n: int, **more: Any) -> SamplingParams:
    return BeamSearchParams(beam_width=width, max_tokens=most, n=n, **more).sampling()


PLAIN_JOBS: dict[str, tuple[str | None, Make]] = {  # by name: the setting that a kind of request needs
    "plain": (None, lambda rng, fields, early, _: SamplingParams(**fields)),
    "several": (None, lambda rng, fields, early, _: SamplingParams(**fields, n=rng.choice([2, 3]))),
    "beams": (None, lambda rng, fields, early, _: _beams(rng.choice([2, 3, 4]), rng.choice([5, 12]), 2)),
    "groups of beams": (None, lambda rng, fields, early, _: _beams(4, 8, 2, groups=2, diversity_penalty=0.7)),
    "best of": (None, lambda rng, fields, early, _: SamplingParams(**{**fields, "temperature": 0.8}, best_of=3)),
    "processor": (None, lambda rng, fields, early, _: SamplingParams(**fields)),
    "rejection": (
        None,
        lambda rng, fields, early, _: SamplingParams(
            seed=fields["seed"], max_tokens=17, temperature=0.8, logprobs=0, verification=rng.choice(["rejection", "block"])
        ),
    ),
}
SOURCE_JOBS = PLAIN_JOBS | {name: (None, make) for name, (_, make) in list(PLAIN_JOBS.items())[:2]}
JOBS = PLAIN_JOBS | {
    "form": (None, lambda rng, fields, early, _: _held(rng, fields)),
    "beams held to a form": (
        None,
        lambda rng, fields, early, _: _beams(3, 16, 1, structured_outputs=StructuredOutputs.of(rng.choice(FORMS))),
    ),
    "contrastive search": (
        None,
        lambda rng, fields, early, _: SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=fields["max_tokens"]),
    ),
    "scores": (
        None,
        lambda rng, fields, early, length: SamplingParams(
            **fields, prompt_logprobs=1, prompt_logprobs_start=rng.randrange(length)
        ),
    ),
    "refined blocks": (
        None,
        lambda rng, fields, early, _: SamplingParams(
            refine=RefineParams(block=rng.choice([3, 8]), passes=rng.choice([1, 2, 3])), max_tokens=fields["max_tokens"]
        ),
    ),
    "contrast": (
        "amateur",
        lambda rng, fields, early, _: SamplingParams(**fields, contrastive_beta=0.5, contrastive_alpha=0.01),
    ),
    "speculative cascade": (
        "amateur",
        lambda rng, fields, early, _: SamplingParams(**fields, defer_rule=rng.choice(["chow", "opt"]), defer_at=0.9),
    ),
    **{
        f"{name} {what}": (needs, make)
        for what, needs in (("exits", "exits"), ("cascades", "cascade"))
        for name, make in {
            "one": lambda rng, fields, early, _: SamplingParams(**fields, **early),
            "again": lambda rng, fields, early, _: SamplingParams(**fields, **early),
            "several": lambda rng, fields, early, _: SamplingParams(**fields, **early, n=rng.choice([2, 3])),
            "form": lambda rng, fields, early, _: _held(rng, fields).replace(**early),
            "processor": lambda rng, fields, early, _: SamplingParams(**fields, **early),
        }.items()
    },
}
