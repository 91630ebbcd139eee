"""From a recipe to a pipeline: its stages, the last stage's recipe, and the executor."""

from dataclasses import replace
from pathlib import Path

import msgspec

from headrace.backends.memory import MemoryPlan
from headrace.backends.native.offer import target_settings, threads_of_process
from headrace.backends.recipe import Recipe
from headrace.engine.executor import PlanRunner
from headrace.parallel.hosts.address import Address, read_key
from headrace.parallel.pipeline.cut import Stage, cut_layers
from headrace.parallel.pipeline.executor import PipelineExecutor, StageHost
from headrace.parallel.pipeline.link import Start
from headrace.parallel.pipeline.stage import Received
from headrace.parallel.ranks import lead
from headrace.parallel.refusals import unsupported_reason
from headrace.weights.digest import files_digest

CHUNK = 256  # default tokens of a step: chunks of a long prompt are the micro-batches


def stages_of(recipe: Recipe) -> tuple[Stage, ...]:
    """The stages of the target. Raises ValueError for layers that do not add up."""
    settings = recipe.settings
    try:
        sizes = [int(size) for size in str(settings.stages).split(",")] if settings.stages else []
    except ValueError:
        raise ValueError(f"stages {settings.stages!r}: give numbers of layers such as 14,16") from None
    return cut_layers(recipe.target.config, settings.pp, sizes)


def hosts_of(recipe: Recipe) -> list[Address]:
    """Addresses of the hosts of the first stages. Raises ValueError."""
    settings = recipe.settings
    if not settings.stage_hosts:
        return []
    addresses = [Address.parse(one) for one in settings.stage_hosts.split(",")]
    if len(addresses) != settings.pp - 1:
        raise ValueError(
            f"stage_hosts {settings.stage_hosts}: pp={settings.pp} needs {settings.pp - 1} addresses, one for each stage "
            "but the last"
        )
    if settings.key_file is None:
        raise ValueError("stage_hosts needs key_file, the file with the key of the links to them")
    read_key(Path(settings.key_file))
    return addresses


def last_stage(recipe: Recipe) -> Recipe:
    """The recipe of the last stage, which this process runs. Raises ValueError for what cannot run in a pipeline."""
    if problem := unsupported_reason(recipe, "pp"):
        raise ValueError(problem)
    settings, stages = recipe.settings, stages_of(recipe)
    hosts_of(recipe)
    chunk = settings.max_num_batched_tokens or CHUNK
    settings = msgspec.structs.replace(settings, threads=threads_of_process(settings), max_num_batched_tokens=chunk)
    return replace(recipe, settings=settings, layers=stages[-1].layers, inputs=Received())


def pipeline_executor(recipe: Recipe, runner: PlanRunner, plan: MemoryPlan) -> PipelineExecutor:
    """Start the processes of the other stages. recipe: of `last_stage`, as it was loaded. Raises ValueError."""
    settings, target = recipe.settings, recipe.target
    assert isinstance(recipe.inputs, Received)
    addresses, files = hosts_of(recipe), ""
    if addresses:
        files = files_digest(target.path)
    template = Start(
        model=str(target.path),
        settings=target_settings(recipe, plan),
        depth=settings.pp,
        slot=lead.most_rows(recipe),
        tp=settings.tp,
        patience=lead.PATIENCE,
    )
    hosts = [StageHost(str(one), str(settings.key_file), files) for one in addresses]
    return PipelineExecutor(runner, recipe.inputs, stages_of(recipe), template, target.config.hidden_size, hosts)
