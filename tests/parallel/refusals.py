"""What runs on several ranks and in pipelines, in two pages: a table of combinations, and the list of refusals."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.backends.recipe import Recipe
from headrace.data.settings import ModelSettings
from headrace.parallel.ranks.share import UNIT, WORLDS
from headrace.parallel.refusals import REFUSALS, unsupported_reason
from headrace.runner.heads import FEATURE, HEADS
from headrace.runner.span import Span
from headrace.startup import selfdraft
from headrace.startup.adapters import open_adapters
from headrace.startup.loading import open_roles
from headrace.startup.opening import Opened, open_files
from tests.architecture import entries
from tests.early_exits import write_exits
from tests.quantized import VOCAB, gptq
from tests.tiny_bert import write_tiny_bert
from tests.tiny_files import Sizes, write_tiny_gguf
from tests.tiny_sources import write_tiny_marian

MODES = (("tp",), ("pp",), ("tp", "pp"))


@dataclass(frozen=True, slots=True)
class Files:
    """Models of one folder, written when they are first named."""

    folder: Path

    @property
    def model(self) -> Path:
        path = self.folder / "tiny.gguf"
        sizes = Sizes(heads=9, kv_heads=3, head_dim=64, ffn=512)
        return path if path.is_file() else write_tiny_gguf(path, mask=3, sizes=sizes, layers=3)

    def heads(self, **more: Any) -> Path:
        return write_exits(self.folder / "-".join(["heads", *more.values()]), self.model, **more)

    def act_order(self) -> Path:
        """A GPTQ folder of two equal layers."""
        made, folder = gptq(act_order=True), self.folder / "act-order"
        made.config = {**made.config, "num_hidden_layers": 2}
        made.tensors |= {name.replace("layers.0.", "layers.1."): tensor.clone() for name, tensor in made.tensors.items()}
        made.write(folder)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
        backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        backend.save(str(folder / "tokenizer.json"))
        return folder

    def lora(self) -> str:
        """An adapter of the first layer's queries."""
        folder, config = self.folder / "lora", open_files(self.model).config
        folder.mkdir(exist_ok=True)
        sizes = {"A": (2, config.hidden_size), "B": (config.layers[0].q_size, 2)}
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
        tensors = {name.format(side): np.zeros(size, np.float32) for side, size in sizes.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
        return str(folder)

    def self_drafting(self) -> str:
        selfdraft.save(self.model, Span(layers=1))
        return "self"


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. settings, model: from the files. changes: of the open model, for what no file has."""

    name: str
    settings: Callable[[Files], dict[str, Any]] = lambda files: {}
    model: Callable[[Files], Path] = lambda files: files.model
    changes: Callable[[Opened], Any] | None = None

    def recipe(self, files: Files, **layout: int) -> Recipe:
        """The recipe that `LLM` makes of it."""
        settings = ModelSettings(**{"device": "cpu", **self.settings(files), **layout})
        opened = open_files(self.model(files))
        if self.changes is not None:
            self.changes(opened)
        return Recipe(open_roles(opened, settings, None), settings, adapters=open_adapters(opened, settings))


def _differing(opened: Opened) -> None:
    first, *others = opened.config.layers
    opened.config = replace(opened.config, layers=(replace(first, heads=3), *others))


def _norming_rows(opened: Opened) -> None:
    opened.config = replace(opened.config, wide_qk_norm=True)


CASES = (
    Case("sampling, `n`, beams, grammars, scores, embeddings, contrastive search"),
    Case("drafts from the text (n-gram, suffix, lookahead, Jacobi)", lambda files: {"speculate": "lookahead"}),
    Case("K/V in int8 or int4, prefix caching", lambda files: {"kv_dtype": "int8"}),
    Case("`quantize`, activations by group or token", lambda files: {"quantize": "int8", "activations": "token"}),
    Case("activations by split", lambda files: {"quantize": "int8", "activations": "split"}),
    Case("act-order folders (GPTQ)", model=lambda files: files.act_order()),
    Case("layers that differ in their heads", changes=_differing),
    Case("a norm over all queries of a row (OLMo 2)", changes=_norming_rows),
    Case("a draft model", lambda files: {"draft": files.model}),
    Case("trained heads", lambda files: {"draft": files.heads(kind=HEADS)}),
    Case("trained heads with a layer of their own", lambda files: {"draft": files.heads(kind=FEATURE)}),
    Case("self-drafts that skip layers", lambda files: {"speculate": files.self_drafting()}),
    Case("drafts of whole blocks", lambda files: {"speculate": "blocks"}),
    Case("an amateur model", lambda files: {"amateur": files.model}),
    Case("adapters (LoRA)", lambda files: {"adapter": files.lora()}),
    Case("early exits", lambda files: {"exits": files.heads()}),
    Case("a cascade by token", lambda files: {"cascade": files.model}),
    Case("encoders and their classifiers", model=lambda files: write_tiny_bert(files.folder / "bert")),
    Case("encoder-decoders", model=lambda files: write_tiny_marian(files.folder / "marian")),
    Case("torch, and dtypes and devices that only torch has", lambda files: {"backend": "torch"}),
)


def table() -> str:
    """The table of combinations."""
    head = [" | ".join(["", *(" and ".join(f"`{name}`" for name in modes) for modes in MODES), ""])]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_HOME", folder)
        files, rows = Files(Path(folder)), []
        for case in CASES:
            recipe = case.recipe(files, tp=2, pp=2)
            cells = ["no" if any(unsupported_reason(recipe, mode) for mode in modes) else "yes" for modes in MODES]
            rows.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join([f"| {head[0].strip()}".replace("|  |", "| |"), "|---|---|---|---|", *rows])


def text() -> str:
    """The list of what tp refuses, with what to do."""
    worlds = ", ".join(map(str, WORLDS[:-1]))
    rows = [
        (f"other values than {worlds} or {WORLDS[-1]}", "choose one of these"),
        (f"fewer units of {UNIT} columns in the heads, the MLP or the vocabulary than ranks", "a smaller tp"),
        *((one.part, one.remedy.format(mode="tp")) for one in REFUSALS if "tp" in one.modes),
    ]
    return entries(f"{part}; instead: {remedy}" for part, remedy in rows)
