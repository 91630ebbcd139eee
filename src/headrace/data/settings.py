"""Settings with which a model is opened, each declared once.

`LLM`, the options of the command line, `serve --config` and docs/en/reference/settings.md are made from the declarations, or
tests compare them with these.
"""

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.data.fields import Declared, Field, declared

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
# Rounding of the inputs of integer weights.
ACTIVATIONS = ("auto", "group", "token", "split", "tensor")
# State of the layers above an early exit: computed later, or made from the row that exited.
DEFERRED, PROPAGATE = "deferred", "propagate"


class Group(Enum):
    """The commands that offer a setting as an option."""

    OPENING = "commands that open a model"
    GENERATING = "commands that generate"
    DECODING = "commands with every decoding method"
    SERVING = "serve"
    PYTHON = "Python only"


@dataclass(frozen=True, slots=True)
class Setting(Field):
    """Declaration of one setting, next to its type and default. `ge`, `le`: its range."""

    _: KW_ONLY
    group: Group = Group.PYTHON


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a model is opened. "auto" and None: Headrace chooses. Values are checked when the model is opened."""

    dtype: Annotated[str, Setting("auto, float64, float32, bfloat16 or float16", group=Group.OPENING)] = "auto"
    device: Annotated[str, Setting("auto, cpu, cuda or cuda:N", group=Group.OPENING)] = "auto"
    backend: Annotated[str, Setting("auto, native or torch", group=Group.OPENING)] = "auto"
    threads: Annotated[int | None, Setting("CPU threads", group=Group.OPENING, ge=1)] = None
    max_model_len: Annotated[
        int | None, Setting("Context in tokens, answer included (default: the model's own)", group=Group.OPENING, ge=1)
    ] = None
    kv_cache_memory: Annotated[
        int | str | None,
        Setting(
            "Memory for the KV cache at most, as in 2GiB (default: a context, and 2048 tokens for each sequence at once)",
            group=Group.OPENING,
        ),
    ] = None
    kv_dtype: Annotated[
        str, Setting("Number format of the KV cache: auto, bfloat16, int8, int4, or a dtype", group=Group.OPENING)
    ] = "auto"
    quantize: Annotated[str | None, Setting("int8 or int4: make integers of float weights at load", group=Group.OPENING)] = None
    activations: Annotated[
        str,
        Setting(
            "How inputs of integer weights are rounded: group (one scale for 32), token (one for a row), split (outliers left "
            "out), tensor (the folder's own scales); auto: as the folder asks, else group",
            group=Group.OPENING,
        ),
    ] = "auto"
    draft: Annotated[
        str | Path | None,
        Setting(
            "A smaller model of the same vocabulary that drafts for this one, or a folder of trained heads",
            group=Group.GENERATING,
        ),
    ] = None
    speculate: Annotated[
        str | None,
        Setting(
            "Who drafts: auto, ngram, suffix, lookahead, jacobi, draft, heads, self, blocks or off. On the native core no "
            "token changes; in torch near ties may fall otherwise, and --verification rejection and block draw other samples",
            group=Group.GENERATING,
        ),
    ] = "auto"
    draft_tokens: Annotated[
        int | None,
        Setting("Tokens drafted at once (default: what pays here, as measured)", group=Group.GENERATING, ge=1, le=16),
    ] = None
    draft_vocab: Annotated[
        int | None,
        Setting("The draft chooses among so many of the most frequent tokens (default: 49152; 0: all)", group=Group.GENERATING),
    ] = None
    cascade: Annotated[
        str | Path | None,
        Setting(
            "A smaller model of the same vocabulary that writes where it is sure: with --cascade-threshold",
            group=Group.GENERATING,
        ),
    ] = None
    exits: Annotated[
        str | Path | None,
        Setting(
            "A folder that train-heads --kind exit wrote for MODEL: tokens leave by them with --exit-threshold",
            group=Group.GENERATING,
        ),
    ] = None
    exit_state: Annotated[
        str,
        Setting(
            "Above an exit the layers catch up later (deferred), or make K and V of the row that left (propagate)",
            group=Group.GENERATING,
        ),
    ] = DEFERRED
    amateur: Annotated[
        str | Path | None,
        Setting(
            "A smaller model of the same vocabulary: contrastive decoding, cascades",
            group=Group.DECODING,
        ),
    ] = None
    parse_special: Annotated[
        bool,
        Setting(
            "Control tokens written inside messages and documents are control tokens; for trusted content alone",
            group=Group.DECODING,
        ),
    ] = False
    max_num_seqs: Annotated[int, Setting("Sequences in a batch", group=Group.SERVING, ge=1)] = 32
    max_num_batched_tokens: Annotated[int | None, Setting("Tokens of a step", group=Group.SERVING, ge=1)] = None
    classifier: Annotated[
        str | Path | None,
        Setting("A folder that train-classifier wrote for MODEL: /v1/classify", group=Group.SERVING),
    ] = None
    enable_prefix_caching: Annotated[bool, Setting("K and V of a prompt's beginning serve later requests")] = True
    seed: Annotated[int | None, Setting("Requests without a seed draw theirs from this one")] = None
    preset: Annotated[str, Setting("Tokens of a step: offline (2048) or online (512, for short pauses)")] = "offline"
    policy: Annotated[str, Setting("continuous or static batching")] = "continuous"

    @property
    def early_exit(self) -> dict[str, Any]:
        """The settings of early exit by name; empty without exits."""
        return {} if self.exits is None else {"exits": self.exits, "exit_state": self.exit_state}

    @property
    def companions(self) -> list[str | Path]:
        """The other models that are opened together with the target."""
        return [model for model in (self.draft, self.amateur, self.cascade) if model is not None]

    @property
    def propagates(self) -> bool:
        """Whether the layers above an early exit take K and V from the row that exited."""
        return self.exit_state == PROPAGATE


def option_settings(*groups: Group, of: type[msgspec.Struct] = ModelSettings) -> tuple[Declared, ...]:
    """The declared settings that commands of these groups offer; without groups all that any command offers."""
    wanted = groups or tuple(group for group in Group if group is not Group.PYTHON)
    return tuple(one for one in declared(of) if isinstance(one.field, Setting) and one.field.group in wanted)
