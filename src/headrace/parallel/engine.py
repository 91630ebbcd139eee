"""The engine of a loaded recipe, in this process or with the stages of a pipeline."""

from dataclasses import replace
from typing import Any

from headrace.backends.memory import MemoryPlan
from headrace.backends.recipe import BLOCK_SIZE, Recipe
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.parallel.pipeline.opening import pipeline_executor
from headrace.runner.runner import Runner


def make_engine(recipe: Recipe, runner: Runner, plan: MemoryPlan, speculation: Any) -> Engine:
    """Build the engine that runs the models of a recipe. speculation: a `drafting.speculation.Speculation`, or None."""
    settings, opened = recipe.settings, recipe.target
    config = opened.config
    limits = plan.max_model_len, settings.max_num_seqs, settings.policy, settings.max_num_batched_tokens
    scheduler = SchedulerConfig.preset(settings.preset, *limits)
    scheduler = replace(scheduler.for_encoder() if config.encoder else scheduler, longer=plan.longer)
    sizes = plan.num_blocks, BLOCK_SIZE, settings.enable_prefix_caching, plan.window, plan.window_blocks
    cache = CacheConfig(*sizes)
    return Engine(
        InProcess(runner) if recipe.layers is None else pipeline_executor(recipe, runner, plan),
        EngineConfig(scheduler, cache),
        vocab_size=config.vocab_size,
        tokenizer=opened.tokenizer,
        eos_ids=opened.eos_ids,
        groups=recipe.groups(),
        speculation=speculation,
        mask_id=config.mask_id,
        judges=recipe.judges,
        start=None if config.source is None or config.reads_sound else config.start,
        audio=None if config.source is None else config.source.audio,
        adapters={adapter.name: adapter.digest for adapter in recipe.adapters},
    )
