"""What does not run on several ranks (tp) or in a pipeline (pp). The tables of the pages are made from `REFUSALS`."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.backends.recipe import BLOCKS, EXITS, HEADS, SELF, Recipe
from headrace.data.plan import AMATEUR, CASCADE, DRAFT
from headrace.models.registry import describe
from headrace.parallel.ranks.share import unsupported_world
from headrace.weights.parts import plan


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that is refused when a model is opened. check: whether a recipe has it. modes: settings that it is refused
    with. remedy: what to do; {mode} stands for the setting."""

    part: str
    remedy: str
    check: Callable[[Recipe], bool]
    modes: tuple[str, ...] = ("tp", "pp")


def _role(name: str, part: str, setting: str) -> Refusal:
    """Another program next to the target, which reads rows of layers that other stages hold."""

    def check(recipe: Recipe) -> bool:
        return any(role.name == name for role in recipe.roles)

    return Refusal(part, f"leave {setting} or {{mode}} out", check, ("pp",))


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
    Refusal("adapters (LoRA)", "run one process: leave {mode} out, or merge one adapter", lambda recipe: bool(recipe.adapters)),
    Refusal("an encoder", "run one process: leave {mode} out", lambda recipe: recipe.target.config.encoder),
    Refusal("an encoder-decoder", "run one process: leave {mode} out", lambda recipe: recipe.target.config.source is not None),
    Refusal(
        "the torch back end, or a dtype or a device that only torch has",
        "{mode} runs on the native core: leave backend, dtype and device out",
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
        ("tp",),
    ),
    Refusal(
        "a model that norms all queries of a row as one vector",
        "ranks have some heads of a row: use pp",
        lambda recipe: recipe.target.config.wide_qk_norm,
        ("tp",),
    ),
    Refusal(
        "a model whose layers differ in their heads",
        "ranks need the same share of each layer: use pp",
        lambda recipe: len({(layer.heads, layer.kv_heads, layer.head_dim) for layer in recipe.target.config.layers}) > 1,
        ("tp",),
    ),
    Refusal(
        "an act-order folder (GPTQ with desc_act)",
        "its columns lie on all ranks: use pp, or take a folder without act-order",
        _act_order,
        ("tp",),
    ),
    Refusal(
        "draft heads with a layer of their own",
        "they read the whole table of tokens, of which ranks have parts: take a draft model or another drafter",
        lambda recipe: any(role.heads.chains for role in recipe.headed),
        ("tp",),
    ),
    _role(DRAFT, "a draft model", "draft"),
    _role(HEADS, "trained heads that draft", "draft"),
    _role(SELF, "self-drafts (speculate='self')", "speculate"),
    _role(BLOCKS, "drafts of whole blocks (speculate='blocks')", "speculate"),
    _role(AMATEUR, "an amateur model", "amateur"),
    _role(EXITS, "early exits", "exits"),
    _role(CASCADE, "a cascade by token", "cascade"),
)


def unsupported_reason(recipe: Recipe, mode: str) -> str:
    """Why a recipe does not run with its tp or pp (`mode`), and what to do; empty if it does."""
    count = getattr(recipe.settings, mode)
    for refusal in REFUSALS:
        if mode in refusal.modes and refusal.check(recipe):
            return f"{mode}={count} does not run {refusal.part} ({recipe.target.name}); {refusal.remedy.format(mode=mode)}"
    return unsupported_world(recipe.target.config, count) if mode == "tp" else ""
