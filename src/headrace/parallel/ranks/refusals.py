"""What does not run on several ranks. The list of docs/en/understand/tensor-parallelism.md is made from `REFUSALS`."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.backends.recipe import Recipe
from headrace.data.plan import TARGET
from headrace.models.registry import describe
from headrace.parallel.ranks.share import unsupported_world
from headrace.weights.parts import plan


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that is refused when a model is opened. check: whether a recipe has it."""

    part: str
    remedy: str
    check: Callable[[Recipe], bool]


def _act_order(recipe: Recipe) -> bool:
    """Whether a matrix that is cut along its columns has them in an order of its own."""
    source, model = recipe.target.source, describe(recipe.target.config)
    plans = plan(model, source)
    return any(
        source.columns(part.source) is not None
        for path, holder in model.holders()
        if getattr(holder, "columns", None) is not None
        for part in plans[f"{path}.weight"]
    )


REFUSALS = (
    Refusal("an encoder", "run one process: leave tp out", lambda recipe: recipe.target.config.encoder),
    Refusal("an encoder-decoder", "run one process: leave tp out", lambda recipe: recipe.target.config.source is not None),
    Refusal(
        "the torch back end, or a dtype or a device that only torch has",
        "tp runs on the native core: leave backend, dtype and device out",
        lambda recipe: (
            recipe.settings.backend == "torch"
            or recipe.settings.dtype not in ("auto", "bfloat16")
            or not recipe.settings.device.startswith("cpu")
        ),
    ),
    Refusal(
        "activations='split'",
        "outliers are counted over whole rows, of which ranks have parts: use group or token",
        lambda recipe: recipe.activations(recipe.target) == "split",
    ),
    Refusal(
        "an act-order folder (GPTQ with desc_act)",
        "its columns lie on all ranks: take a folder without act-order",
        _act_order,
    ),
    Refusal(
        "draft heads with a layer of their own",
        "they read the whole table of tokens, of which ranks have parts: take a draft model or another drafter",
        lambda recipe: any(role.heads.chains for role in recipe.headed),
    ),
    Refusal(
        "a model whose layers differ in their heads",
        "ranks need the same share of each layer: leave tp out",
        lambda recipe: len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in recipe.target.config.layers}) > 1,
    ),
)


def unsupported_reason(recipe: Recipe) -> str:
    """Why the target of a recipe does not run on `settings.tp` ranks, and what to do; empty if it does."""
    world = recipe.settings.tp
    for refusal in REFUSALS:
        if refusal.check(recipe):
            return f"tp={world} does not run {refusal.part} ({recipe.models[TARGET.name].name}); {refusal.remedy}"
    return unsupported_world(recipe.target.config, world)
