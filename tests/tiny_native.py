"""Tiny random models on the native core: their weights as a file would hold them, and engines and programs that run them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.lowering import FUSIONS
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.backends.native.weights import PackedWeights
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.models.base import Model
from headrace.models.family import Family, FileFormat
from headrace.models.gguf import decoder
from headrace.runner.runner import Runner
from headrace.weights.origins import NameMap, Origin
from tests.models.zoo import MemorySource, written
from tests.tiny import finish, kept_windows, tiny_config, tiny_model, tokens_of, window_sizes

BLOCK = 16
MAX_LEN = 256


@lru_cache(maxsize=8)
def native_model(architecture: str = "llama", **changes: object) -> Model:
    """A tiny model in float64 whose matrices are what bfloat16 holds exactly. One object for the same arguments."""
    return as_bfloat16(tiny_model(tiny_config(architecture, **changes)))


def as_bfloat16(model: Model) -> Model:
    """The model with matrices rounded to bfloat16 and vectors to float32, as the core holds them."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16() if parameter.dim() == 2 else parameter.float())
    return model


def source_of(model: Model) -> MemorySource:
    """The model's weights under the names and in the layouts of a Hugging Face folder."""
    tensors = written(model, "safetensors")
    return MemorySource("safetensors", {name: tensor.float() for name, tensor in tensors.items()}, {})


class OwnNames(dict[str, Origin]):
    """Every tensor is called what the parameter is."""

    def __missing__(self, target: str) -> Origin:
        return Origin(target)


def family(name: str) -> Family:
    """A row for a model file of a test's own."""
    return Family(name, name, FileFormat(decoder, NameMap(OwnNames())), "is made in memory")


@lru_cache(maxsize=16)
def packed(model: Model, quantize: str = "", threads: int = 1) -> PackedWeights:
    return PackedWeights(model, source_of(model), thread_pool(threads), quantize)


def native_program(model: Model, *, blocks: int = 64, threads: int = 1, quantize: str = "", **options: Any) -> NativeProgram:
    settings: dict[str, Any] = {"num_blocks": blocks, "block_size": BLOCK, "max_positions": MAX_LEN + 64, **options}
    if "fuse" not in settings:
        settings["weights"] = packed(model, quantize, threads)
    return NativeProgram(model, source_of(model), threads=threads, quantize=quantize, **settings)


def native_engine(
    model: Model,
    *,
    budget: int = 64,
    blocks: int = 64,
    block_size: int = 4,
    seqs: int = 16,
    quantize: str = "",
    kv_dtype: str = "auto",
    speculation: Speculation | None = None,
    windows: bool = True,
    **cache: bool,
) -> Engine:
    """Like tests.tiny.tiny_engine on the native core, whose blocks are 16 tokens: as many as hold the same."""
    blocks = -(-blocks * block_size // BLOCK)
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_LEN)
    window = window_sizes(model, BLOCK, seqs, budget, blocks) if windows else kept_windows(model, blocks)
    config = EngineConfig(scheduler, CacheConfig(blocks, BLOCK, **cache, **window))
    program = native_program(model, blocks=blocks, quantize=quantize, kv_dtype=kv_dtype, **window)
    return Engine(InProcess(Runner(program)), config, vocab_size=model.config.vocab_size, speculation=speculation)


def native_alone(
    model: Model, prompt: list[int], params: SamplingParams, child: int = 0, quantize: str = "", kv_dtype: str = "auto"
) -> list[int]:
    """Like tests.tiny.run_alone, on the native core."""
    options: dict[str, Any] = {"prefix_caching": False, "windows": False}
    engine = native_engine(model, budget=256, quantize=quantize, kv_dtype=kv_dtype, **options)
    request = engine.add(prompt, params.replace(n=1))
    request.seqs[0].decode.index = child
    finish(engine)
    return tokens_of(request)[0]


class Feeder:
    """Sequences on a program, fed as a test likes, with the logits of every row."""

    def __init__(self, program: NativeProgram, sequences: Sequence[Sequence[int]]) -> None:
        self.program = program
        self.sequences = [core.module().Sequence(list(tokens), core.module().SampleParams()) for tokens in sequences]
        self.lengths = [len(tokens) for tokens in sequences]
        at = 0
        for sequence, length in zip(self.sequences, self.lengths, strict=True):
            count = -(-(length + 64) // BLOCK)  # room for a draft
            sequence.set_table(0, 0, list(range(at, at + count)))
            at += count

    def feed(
        self,
        *feeds: tuple[int, int, int],
        nodes: Sequence[int] = (),
        parents: Sequence[int] = (),
        full: bool = False,
        **run: Any,
    ) -> list[np.ndarray]:
        """Logits [rows, vocabulary] of each (sequence, start, count); the last one also has a draft."""
        step = core.module().Step()
        asked = []
        for number, (which, start, count) in enumerate(feeds):
            draft = (list(nodes), list(parents)) if number == len(feeds) - 1 else ([], [])
            rows = count + len(draft[0])
            step.feed(self.sequences[which], start, count, rows, *draft, full=full)
            asked.append([step.logits(row) for row in range(rows)])
        self.program.core.run(step, **run)
        return [np.stack([np.frombuffer(step.row_of_logits(i), "<f4") for i in answers]) for answers in asked]

    def whole(self) -> list[np.ndarray]:
        """All sequences, each fed whole, in one step."""
        return self.feed(*((which, 0, length) for which, length in enumerate(self.lengths)))


def all_fusions() -> list[frozenset[str]]:
    """None of the fusions, and each left out alone."""
    return [frozenset(), *(FUSIONS - {name} for name in sorted(FUSIONS))]
