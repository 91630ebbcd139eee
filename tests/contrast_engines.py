"""Engines of an expert and an amateur, in torch and on the native core."""

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.plan import AMATEUR, HIDDEN, TARGET, KVGroup
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.runner.program import Program
from headrace.runner.runner import Runner
from tests.tiny import VOCAB

GROUPS = (TARGET, KVGroup(AMATEUR), KVGroup(HIDDEN, "hidden"))


def engine_of(expert: Model, amateur: Model, *, blocks: int = 96, budget: int = 64, **cache: bool) -> Engine:
    """In torch and float64, in blocks of 4."""
    runners = [EagerProgram(m, KVPool(m.config, blocks, 4, torch_dtype(m))) for m in (expert, amateur)]
    return _engine(runners, blocks, 4, budget, cache)


def native_engine_of(expert: Model, amateur: Model, *, blocks: int = 96, budget: int = 64, **cache: bool) -> Engine:
    """On the native core, whose blocks are 16 tokens: as many as hold the same."""
    from tests.tiny_native import BLOCK, native_program

    blocks = -(-blocks * 4 // BLOCK)
    return _engine([native_program(m, blocks=blocks) for m in (expert, amateur)], blocks, BLOCK, budget, cache)


def torch_dtype(model: Model):  # type: ignore[no-untyped-def]
    return next(model.parameters()).dtype


def _engine(runners: list[Program], blocks: int, size: int, budget: int, cache: dict[str, bool]) -> Engine:
    scheduler = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=256)
    config = EngineConfig(scheduler, CacheConfig(blocks, size, **cache))
    return Engine(InProcess(Runner(runners[0], runners[1:], amateur=1)), config, vocab_size=VOCAB, groups=GROUPS)
