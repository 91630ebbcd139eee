"""The models that are opened together, as roles, with their settings. Program numbers, KV groups and memory follow from them.

Needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends import memory
from headrace.data.config import ModelConfig, SchedulerConfig
from headrace.data.plan import AMATEUR, CASCADE, DRAFT, FEATURES, HIDDEN, PROPAGATED, TARGET, UPPER, KVGroup
from headrace.data.progress import Progress
from headrace.data.settings import ModelSettings
from headrace.drafting.base import DraftSource
from headrace.drafting.suffix import MEMORY, TOKEN_BYTES
from headrace.runner.program import InputRows
from headrace.runner.span import Span
from headrace.startup.opening import Opened
from headrace.text.tokenizer import frequent_tokens

BLOCK_SIZE = 16
# Default number of tokens in a draft model's head: 97 % of the tokens of code and prose.
DRAFT_VOCAB = 49152
# Texts of full length that fit an encoder's KV pool. Its K and V last for one step.
ENCODER_TEXTS = 4
# Names of roles that are not names of KV groups.
HEADS, SELF, BLOCKS, EXITS = "heads", "self", "blocks", "exits"


@dataclass(frozen=True, slots=True)
class Role:
    """One of the models of a recipe.

    name: `target`; `draft`, a draft model; `amateur`, for contrastive decoding; `self` or `blocks`, a `span` of the target or
    all of it as a drafter; `heads`, trained heads that draft; `exits` or `cascade`, an exit of the target or a smaller model
    whose confident tokens are accepted without the target. The last two have no plans of their own, so they come last.
    heads: a `runner.heads.Heads`; those of exits stand after a `span`.
    """

    name: str
    opened: Opened | None = None
    span: Span | None = None
    heads: Any = None

    @property
    def chains(self) -> bool:
        """Whether its drafts have K and V of their own."""
        if self.heads is not None:
            return bool(self.heads.chains)
        return self.opened is not None and self.name not in (TARGET.name, AMATEUR, CASCADE)


# Starts the ranks of a recipe's target with the settings of its program. Returns a `backends.protocol.RankGroup`.
StartRanks = Callable[["Recipe", Any], Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The models to open, the target first, with settings and a progress display. A role's index is its program's number.

    layers, inputs: of a pipeline's last stage, the layers of the target that run in this process, and their input rows.
    start_ranks: starts the processes that share the target, for `settings.tp` above 1.
    shared_weights: descriptor of the file in memory in which all replicas have the target's weights.
    adapters: of the target (weights.lora.Adapter); requests name one of them, or none.
    """

    roles: tuple[Role, ...]
    settings: ModelSettings
    progress: Progress = field(default_factory=Progress)
    layers: range | None = None
    inputs: InputRows | None = None
    start_ranks: "StartRanks | None" = None
    shared_weights: int | None = None
    adapters: tuple[Any, ...] = ()

    @property
    def target(self) -> Opened:
        opened = self.roles[0].opened
        assert opened is not None
        return opened

    def activations(self, opened: Opened) -> str:
        """Rounding of the inputs of integer weights: the caller's setting, else the folder's; "auto": the back end's."""
        return opened.activations if self.settings.activations == "auto" else self.settings.activations

    @property
    def models(self) -> dict[str, Opened]:
        """By role, the models with files of their own."""
        return {role.name: role.opened for role in self.roles if role.opened is not None}

    @property
    def owners(self) -> dict[str, str]:
        """By role, the first role with the same file, which loads the weights."""
        firsts: dict[Path, str] = {}
        return {role: firsts.setdefault(each.path.resolve(), role) for role, each in self.models.items()}

    @property
    def headed(self) -> list[Role]:
        """The roles with trained heads."""
        return [role for role in self.roles if role.heads is not None]

    @property
    def heads(self) -> Any:
        """The heads that draft; None if there are none."""
        return next((role.heads for role in self.headed if role.name == HEADS), None)

    @property
    def exits(self) -> tuple[int, ...]:
        """Number of layers below each exit at which tokens of the target may stop, ascending; empty without exits."""
        return next((tuple(role.heads.used) for role in self.roles if role.name == EXITS), ())

    @property
    def judges(self) -> bool:
        """Whether the early exits have confidence classifiers."""
        return any(role.name == EXITS and role.heads.judges for role in self.headed)

    @property
    def propagates(self) -> bool:
        """Whether the layers above an exit take K and V from the row at the exit."""
        return bool(self.exits) and self.settings.propagates

    @property
    def features(self) -> bool:
        """Whether the target's hidden rows are stored for trained heads."""
        return self.heads is not None and bool(self.heads.features)

    def number(self, name: str) -> int:
        """Number of a role's program in step plans; 0, the target's, if there is no such role."""
        return next((number for number, role in enumerate(self.roles) if role.name == name), 0)

    def groups(self) -> tuple[KVGroup, ...]:
        """The KV groups of all models, the target's first."""
        groups = [TARGET, *(KVGroup(role.name, model=number) for number, role in enumerate(self.roles) if role.chains)]
        # The target's feeds fill it, for requests that combine both models.
        if AMATEUR in self.models:
            groups.append(KVGroup(AMATEUR))
        groups.append(KVGroup(HIDDEN, "hidden"))
        for first, end in pairwise((*self.exits, self.target.config.num_layers)):
            groups.append(KVGroup(UPPER, PROPAGATED if self.propagates else "full", tuple(range(first, end))))
        # The target's feeds fill the smaller model's K and V; the target's own may lag.
        if CASCADE in self.models:
            groups += [KVGroup(CASCADE), KVGroup(UPPER)]
        return (*groups, KVGroup(FEATURES, "hidden")) if self.features else tuple(groups)

    def drafter(self) -> DraftSource | None:
        """The model or heads that draft for the target; None if there are none."""
        groups = self.groups()
        for number, role in enumerate(self.roles):
            if role.name in (DRAFT, HEADS, SELF, BLOCKS):
                group = next((g for g, each in enumerate(groups) if each.model == number), None)
                kind, count = ("", 0) if role.heads is None else (role.heads.kind, role.heads.count)
                mask = self.target.config.mask_id
                return DraftSource(role.name, number, group, kind, count, -1 if mask is None else mask)
        return None

    def head_ids(self) -> dict[str, np.ndarray]:
        """By role, the token ids (ascending) that its head is reduced to: the frequent tokens of a draft model."""
        if (draft := self.models.get(DRAFT)) is None:
            return {}
        size, asked = draft.config.vocab_size, self.settings.draft_vocab
        count = DRAFT_VOCAB if asked is None else asked
        return {DRAFT: np.array(frequent_tokens(draft.tokenizer, size, count))} if 0 < count < 0.75 * size else {}

    @property
    def longest(self) -> int:
        """Length of the longest possible context: the smallest of the models' limits and `max_model_len`."""
        known = min(model.config.max_position for model in self.models.values())
        return min(known, self.settings.max_model_len or known)

    def longest_source(self, encoder: ModelConfig) -> int:
        """Positions of the longest source of an encoder."""
        return self.longest if encoder.audio is None else encoder.audio.positions

    def scratch(self, pool_bytes: Callable[[ModelConfig], int]) -> int:
        """Bytes of the pools in which sources are encoded. pool_bytes: bytes of one encoder's pool."""
        return sum(pool_bytes(each.config.source) for each in self.models.values() if each.config.source is not None)

    @property
    def window(self) -> int:
        """Number of tokens that the target's window layers keep in a pool of their own; 0: all layers share one pool.

        A K/V store saves the blocks of all layers, so they stay together.
        """
        context = self.settings.max_model_len or self.target.config.max_position
        return 0 if self.settings.kv_store is not None else self.target.config.shared_window(context)

    def plan(
        self, kv_bytes: Callable[[ModelConfig, int], list[int]], row_bytes: int, free: int, scratch: int = 0
    ) -> memory.MemoryPlan:
        """The memory plan.

        kv_bytes: bytes of one block in each pool of a model, by its window. row_bytes: bytes of one value in a hidden row.
        free: bytes free after the weights. scratch: bytes of the pools in which sources are encoded. Raises ValueError.
        """
        settings, config, window = self.settings, self.target.config, self.window
        block_bytes, *window_bytes = kv_bytes(config, window)
        block_bytes += sum(sum(kv_bytes(model.config, 0)) for name, model in self.models.items() if name != TARGET.name)
        if self.features:  # hidden rows of the target, and K and V of the heads
            block_bytes += BLOCK_SIZE * config.hidden_size * row_bytes
            block_bytes += sum(kv_bytes(replace(config, layers=(config.full_layer,)), 0)) if self.heads.chains else 0
        if not self.propagates:  # the rows at the exits
            block_bytes += len(self.exits) * BLOCK_SIZE * config.hidden_size * row_bytes
        if settings.speculate == "suffix":  # automata of running sequences and of ended outputs
            block_bytes += BLOCK_SIZE * TOKEN_BYTES
            free -= MEMORY * TOKEN_BYTES
        return memory.plan(
            replace(config, max_position=min(model.config.max_position for model in self.models.values())),
            block_bytes=block_bytes,
            block_size=BLOCK_SIZE,
            free=free,
            max_num_seqs=min(settings.max_num_seqs, ENCODER_TEXTS) if config.encoder else settings.max_num_seqs,
            max_model_len=settings.max_model_len,
            kv_cache_memory=settings.kv_cache_memory,
            scratch=scratch,
            window=self._window_pool(window, sum(window_bytes)),
        )

    def _window_pool(self, window: int, block_bytes: int) -> memory.WindowPool | None:
        if not window:
            return None
        settings = self.settings
        limits = settings.max_num_seqs, settings.policy, settings.max_num_batched_tokens
        chunk = SchedulerConfig.preset(settings.preset, self.longest, *limits).max_num_batched_tokens
        blocks = memory.window_blocks(window, BLOCK_SIZE, settings.max_num_seqs, chunk)
        return memory.WindowPool(window, block_bytes, blocks, len(self.target.config.kv_sizes) > 1)
