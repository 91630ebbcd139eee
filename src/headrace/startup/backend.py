"""Choice of the back end when a model is opened: native if it supports the recipe, otherwise torch, with a line in the log."""

import logging
from dataclasses import dataclass, replace

import msgspec

from headrace import host
from headrace.backends import memory
from headrace.backends.eager.offer import EagerBackend
from headrace.backends.native import offload
from headrace.backends.native.offer import NativeBackend, threads_of_process
from headrace.backends.protocol import Backend, LoadedPrograms
from headrace.backends.recipe import EXITS, Recipe, Role
from headrace.data.config import parse_bytes
from headrace.data.plan import AMATEUR, CASCADE, DRAFT, FEATURES, HIDDEN, UPPER
from headrace.data.settings import ACTIVATIONS, DEFERRED, DTYPES, PROPAGATE, ModelSettings
from headrace.drafting.methods import check_speculation
from headrace.parallel.ranks.lead import lead
from headrace.parallel.refusals import unsupported_reason
from headrace.runner.early_exit import DraftExits, Exit
from headrace.runner.program import Program
from headrace.runner.record import RecordError
from headrace.runner.runner import Runner
from headrace.runner.span import Span
from headrace.startup.kv_store import check_kv_store
from headrace.startup.loading import pick_device
from headrace.startup.opening import Opened
from headrace.weights.kinds import FLOATS
from headrace.weights.kv_settings import kv_settings
from headrace.weights.schemes.folder import input_scale

log = logging.getLogger("headrace")

# In order of preference.
BACKENDS: tuple[Backend, ...] = (NativeBackend(), EagerBackend())


@dataclass(frozen=True, slots=True)
class Started:
    """A runner with loaded weights. recipe: as it was loaded, with the KV format of the target's file. name: its back end.
    dtype: number format of the computation."""

    recipe: Recipe
    name: str
    row_invariant: bool
    runner: Runner
    plan: memory.MemoryPlan
    dtype: str

    @property
    def exactness(self) -> str:
        """bitwise if outputs do not depend on batch, chunks and drafts; near-tie-exact if nearly equal tokens may swap."""
        return "bitwise" if self.row_invariant else "near-tie-exact"


def start(recipe: Recipe) -> Started:
    """Load a recipe's models into a back end.

    With backend "auto" the first back end that supports the recipe is used, and the reason is logged if it is not the first.
    A named back end that does not support it is an error. Raises ValueError (also WeightError), one line.
    """
    recipe = _with_file_kv_dtype(recipe)
    settings = recipe.settings
    _check(recipe)
    if settings.offload:
        return _start_offload(recipe)
    if settings.tp != 1:
        return _start_ranks(recipe)
    asked = [offer for offer in BACKENDS if settings.backend in ("auto", offer.name)]
    for number, offer in enumerate(asked, 1):
        problem, level = offer.unsupported_reason(recipe), logging.INFO
        if not problem:
            try:
                return _start(offer, recipe)
            except RecordError as error:
                problem, level = str(error), logging.WARNING
        if settings.backend != "auto":
            raise ValueError(f"the {offer.name} back end cannot run this: {problem}; use backend='auto'")
        if number < len(asked) and settings.device.startswith("cpu"):
            log.log(level, "running in %s: %s", asked[number].name, problem)
    raise ValueError(f"no back end can run this: {problem}")


def _start_ranks(recipe: Recipe) -> Started:
    """Load a recipe whose target is divided between processes. Raises ValueError (also WeightError), one line."""
    native = BACKENDS[0]
    if problem := unsupported_reason(recipe, "tp") or native.unsupported_reason(recipe):
        raise ValueError(problem)
    try:
        return _start(native, replace(recipe, start_ranks=lead))
    except RecordError as error:
        raise ValueError(f"tp={recipe.settings.tp}: {error}; leave tp out") from None


def _start_offload(recipe: Recipe) -> Started:
    """Load a recipe whose target may be larger than memory. Raises ValueError (also WeightError), one line."""
    native = BACKENDS[0]
    problem = offload.unsupported_reason(recipe) or native.unsupported_reason(recipe)
    if not problem:
        try:
            return _start(native, recipe)
        except RecordError as error:
            problem = str(error)
    raise ValueError(f"offload: {problem}; leave offload out")


def _with_file_kv_dtype(recipe: Recipe) -> Recipe:
    """The recipe with the KV format of the target's file, if the caller gave none."""
    target = recipe.target
    settings = None if target.config.encoder else kv_settings(target.source, target.config)
    if settings is None or recipe.settings.kv_dtype != "auto":
        return recipe
    log.info("K and V in %s, as %s asks for", settings.format, target.path.name)
    return replace(recipe, settings=msgspec.structs.replace(recipe.settings, kv_dtype=settings.format))


def check_settings(settings: ModelSettings, target: Opened | None = None) -> None:
    """Raise ValueError for settings that no back end, or not the `target`, supports. Needs no weights and no torch."""
    names = ["auto", *(offer.name for offer in BACKENDS)]
    if settings.backend not in names:
        raise ValueError(f"unknown backend {settings.backend!r}; use {', '.join(names)}")
    known = {"auto"}.union(*(offer.kv_dtypes for offer in BACKENDS))
    if settings.kv_dtype not in known:
        raise ValueError(f"unknown kv_dtype {settings.kv_dtype!r}; use one of {', '.join(sorted(known))}")
    if settings.quantize not in (None, "int8", "int4"):
        raise ValueError(f"quantize must be int8 or int4, not {settings.quantize!r}")
    if settings.activations not in ACTIVATIONS:
        raise ValueError(f"activations must be {', '.join(ACTIVATIONS)}, not {settings.activations!r}")
    if settings.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {settings.dtype!r}; use {', '.join(DTYPES)}")
    if settings.kv_cache_memory is not None:
        parse_bytes(settings.kv_cache_memory)
    check_kv_store(settings, None if target is None else target.config)
    if target is not None:
        memory.check_context(settings.max_model_len, target.config)


def check_arguments(settings: ModelSettings, target: Opened | None) -> None:
    """Check the settings of a model before its weights are read. target: its open files, None if not known yet.

    Raises ValueError.
    """
    pick_device(settings.device)
    check_settings(settings, target)
    check_speculation(settings.speculate, settings.draft_tokens)


def _check(recipe: Recipe) -> None:
    """Raise ValueError for settings that do not fit the models of the recipe."""
    settings = recipe.settings
    check_settings(settings)
    if settings.activations != "auto" and not settings.quantize:
        for each in recipe.models.values():
            if all(each.source.info(name).kind in FLOATS for name in each.source.names()):
                raise ValueError(
                    f"activations={settings.activations!r} rounds the inputs of integer weights, and {each.name} has floats "
                    "alone: leave it out, or add quantize='int8'"
                )
    if settings.activations == "tensor":
        for each in recipe.models.values():
            if all(input_scale(each.source, [name]) is None for name in each.source.names()):
                raise ValueError(
                    f"activations='tensor' takes the scales of inputs that a folder of compressed-tensors has (static W8A8), "
                    f"and {each.name} has none: choose token, which needs none"
                )
    if len({each.config.source is None for each in recipe.models.values()}) > 1:
        raise ValueError(
            "an encoder-decoder works only with another one, because both read its source; leave out draft, amateur and "
            "cascade, or name a smaller model of its kind"
        )
    if settings.exit_state not in (DEFERRED, PROPAGATE):
        raise ValueError(f"unknown exit_state {settings.exit_state!r}; use {DEFERRED} or {PROPAGATE}")
    if settings.exit_state != DEFERRED and not recipe.exits:
        raise ValueError("exit_state needs exits; name their folder with exits, or leave exit_state out")
    if settings.draft_vocab is not None and (settings.draft_vocab < 0 or DRAFT not in recipe.models):
        raise ValueError("draft_vocab is how many tokens a draft model chooses from, 0 being all; name that model with draft")


def _start(offer: Backend, recipe: Recipe) -> Started:
    """Load all programs into one runner. Memory for the hidden states of contrastive search is checked at their first use."""
    _warn_if_crowded(recipe.settings)
    loaded = offer.load(recipe)
    target, *beside = recipe.roles
    companions = [_companion(role, loaded) for role in beside if role.name not in (EXITS, CASCADE)]
    cascade = next((_companion(role, loaded) for role in beside if role.name == CASCADE), None)
    leaves = next((_exits(role, loaded) for role in beside if role.name == EXITS), cascade)
    assert not isinstance(leaves, Span | DraftExits)
    runner = Runner(loaded.programs[target.name], companions, recipe.number(AMATEUR), leaves, recipe.propagates)
    runner.kept[HIDDEN].afford = lambda need: memory.check_hidden_fits(loaded.plan, need, offer.free_memory(recipe))
    if recipe.features:
        runner.reserve(FEATURES)
    if UPPER in runner.kept and not recipe.propagates:
        runner.reserve(UPPER)
    return Started(recipe, offer.name, offer.row_invariant, runner, loaded.plan, loaded.dtype)


def _warn_if_crowded(settings: ModelSettings) -> None:
    """Log a warning if the ranks and stages of a model have more threads than there are cores."""
    processes, threads, cores = settings.tp * settings.pp, threads_of_process(settings), host.cores()
    if processes > 1 and processes * threads > cores:
        text = "%d processes of %d threads share %d cores and wait for each other; one process is faster"
        log.warning(text, processes, threads, cores)


def _companion(role: Role, loaded: LoadedPrograms) -> Program | Span | Exit | DraftExits:
    """The program of a role, a span of the target, or exits of it."""
    if role.span is None:
        return loaded.programs[role.name]
    if role.heads is None:
        return role.span
    exits = _exits(role, loaded)
    return exits[0] if len(exits) == 1 else DraftExits(exits)


def _exits(role: Role, loaded: LoadedPrograms) -> tuple[Exit, ...]:
    head, heads = loaded.programs[role.name], role.heads
    partial = len(heads.vocab) < head.config.vocab_size
    return tuple(Exit(Span(layers), head, heads.layers.index(layers), partial) for layers in heads.used)
