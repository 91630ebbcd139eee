"""What is opened together: a target, and what works beside it, as roles. Numbers of programs, KV groups and sizes follow from
them. Needs no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends import memory
from headrace.data.config import ModelConfig
from headrace.data.plan import AMATEUR, CASCADE, DRAFT, FEATURES, HIDDEN, PROPAGATED, TARGET, UPPER, KVGroup
from headrace.data.progress import Progress, Silent
from headrace.data.settings import ModelSettings
from headrace.drafting.draft_model_kv import DraftSource
from headrace.drafting.suffix import MEMORY, TOKEN_BYTES
from headrace.runner.span import Span
from headrace.startup.opening import Opened
from headrace.text.frequent_tokens import frequent_tokens

BLOCK_SIZE = 16
DRAFT_VOCAB = 49152  # tokens of a draft's head, unless told otherwise: 97 % of code and prose
ENCODER_TEXTS = 4  # of full length: an encoder's K and V last for one step
HEADS, SELF, BLOCKS, EXITS = "heads", "self", "blocks", "exits"  # names of roles, beside those of groups


@dataclass(frozen=True, slots=True)
class Role:
    """The target (`target`), or what works beside it: a model that drafts (`draft`) or that the target is contrasted with
    (`amateur`), a `span` of the target (`self`; `blocks`: all of it), trained `heads` (`runner.heads.Heads`; those of exits
    after a `span`), or who may write before the target does: an exit of it (`exits`), or a smaller model (`cascade`). No plan
    names that one, so it comes last."""

    name: str
    opened: Opened | None = None
    span: Span | None = None
    heads: Any = None

    @property
    def chains(self) -> bool:
        """Whether K and V of its own grow with its drafts."""
        if self.heads is not None:
            return bool(self.heads.chains)
        return self.opened is not None and self.name not in (TARGET.name, AMATEUR, CASCADE)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Roles in the order of their programs' numbers, the target first, how they are run, and who is told of the loading."""

    roles: tuple[Role, ...]
    settings: ModelSettings
    progress: Progress = field(default_factory=Silent)

    @property
    def target(self) -> Opened:
        opened = self.roles[0].opened
        assert opened is not None
        return opened

    def activations(self, opened: Opened) -> str:
        """How inputs of a model's integer weights are rounded: as the caller says, else as its folder asks; "auto": as the back
        end does it."""
        return opened.activations if self.settings.activations == "auto" else self.settings.activations

    @property
    def models(self) -> dict[str, Opened]:
        """By role the models whose files are read."""
        return {role.name: role.opened for role in self.roles if role.opened is not None}

    @property
    def owners(self) -> dict[str, str]:
        """By role who brings its weights: the first role of the same file."""
        firsts: dict[Path, str] = {}
        return {role: firsts.setdefault(each.path.resolve(), role) for role, each in self.models.items()}

    @property
    def headed(self) -> list[Role]:
        """The roles with trained heads."""
        return [role for role in self.roles if role.heads is not None]

    @property
    def heads(self) -> Any:
        """Those that draft."""
        return next((role.heads for role in self.headed if role.name == HEADS), None)

    @property
    def leaves(self) -> Span | None:
        """The target's layers below the exit by which tokens leave."""
        return next((role.span for role in self.roles if role.name == EXITS), None)

    @property
    def judges(self) -> bool:
        """Whether the exits by which tokens leave have classifiers."""
        return any(role.name == EXITS and role.heads.judges for role in self.headed)

    @property
    def propagates(self) -> bool:
        """Whether rows that leave go up as they are."""
        return self.leaves is not None and self.settings.propagates

    @property
    def features(self) -> bool:
        """Whether rows of the target are kept for trained heads."""
        return self.heads is not None and bool(self.heads.features)

    def number(self, name: str) -> int:
        """Of a role: by it plans name who is fed. 0 is the target, or nobody beside it."""
        return next((number for number, role in enumerate(self.roles) if role.name == name), 0)

    def groups(self) -> tuple[KVGroup, ...]:
        """The KV groups of all models, the target's first."""
        groups = [TARGET, *(KVGroup(role.name, model=number) for number, role in enumerate(self.roles) if role.chains)]
        if AMATEUR in self.models:
            groups.append(KVGroup(AMATEUR))  # the target's feeds fill it, where a request is decoded together with it
        groups.append(KVGroup(HIDDEN, "hidden"))
        if self.leaves is not None:
            layers = tuple(range(self.leaves.layers, self.target.config.num_layers))
            groups.append(KVGroup(UPPER, PROPAGATED if self.propagates else "full", layers))
        if CASCADE in self.models:  # the target's feeds fill the smaller model's, where a request cascades; its own may lag
            groups += [KVGroup(CASCADE), KVGroup(UPPER)]
        return (*groups, KVGroup(FEATURES, "hidden")) if self.features else tuple(groups)

    def drafter(self) -> DraftSource | None:
        """What drafts beside the target."""
        groups = self.groups()
        for number, role in enumerate(self.roles):
            if role.name in (DRAFT, HEADS, SELF, BLOCKS):
                group = next((g for g, each in enumerate(groups) if each.model == number), None)
                kind, count = ("", 0) if role.heads is None else (role.heads.kind, role.heads.count)
                mask = self.target.config.mask_id
                return DraftSource(role.name, number, group, kind, count, -1 if mask is None else mask)
        return None

    def head_ids(self) -> dict[str, np.ndarray]:
        """By role the only tokens (ascending) that a model chooses from: a draft's are the frequent ones."""
        if (draft := self.models.get(DRAFT)) is None:
            return {}
        size, asked = draft.config.vocab_size, self.settings.draft_vocab
        count = DRAFT_VOCAB if asked is None else asked
        return {DRAFT: np.array(frequent_tokens(draft.tokenizer, size, count))} if 0 < count < 0.75 * size else {}

    @property
    def longest(self) -> int:
        """Positions of the longest context there may be: that which all models know, or was asked for."""
        known = min(model.config.max_position for model in self.models.values())
        return min(known, self.settings.max_model_len or known)

    def scratch(self, pool_bytes: Callable[[ModelConfig], int]) -> int:
        """Bytes of the pools in which sources are encoded, by what an encoder's takes."""
        return sum(pool_bytes(each.config.source) for each in self.models.values() if each.config.source is not None)

    def plan(self, kv_bytes: Callable[[ModelConfig], int], row_bytes: int, free: int, scratch: int = 0) -> memory.MemoryPlan:
        """The memory plan for `free` bytes beside the weights. `kv_bytes`: of a block, in all layers of a model; `row_bytes`:
        of a number in a hidden row; `scratch`: what sources are encoded in. Raises DoesNotFit."""
        settings, config = self.settings, self.target.config
        block_bytes = sum(kv_bytes(model.config) for model in self.models.values())
        if self.features:  # the target's rows, and K and V of the heads' own
            block_bytes += BLOCK_SIZE * config.hidden_size * row_bytes
            block_bytes += kv_bytes(replace(config, layers=config.layers[:1])) if self.heads.chains else 0
        if self.leaves is not None and not self.propagates:  # the rows at the exit
            block_bytes += BLOCK_SIZE * config.hidden_size * row_bytes
        if settings.speculate == "suffix":  # automata of running sequences, and of ended outputs
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
        )
