"""Settings with which a model is opened, and limits of a server, each declared once.

`LLM`, the options of the command line, `serve --config` and docs/en/reference/settings.md are made from the declarations, or
tests compare them with these.
"""

from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headrace.data.fields import Declared, Field, check, declared

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
# Rounding of the inputs of integer weights.
ACTIVATIONS = ("auto", "group", "token", "split", "tensor")
# State of the layers above an early exit: computed later, or made from the row that exited.
DEFERRED, PROPAGATE = "deferred", "propagate"
# Choice of a replica for a request (server/engines/router.py).
RoutePolicy = Literal["affinity", "least", "round"]


class SettingGroup(Enum):
    """The commands that offer a setting as an option."""

    OPENING = "commands that open a model"
    GENERATING = "commands that generate"
    DECODING = "commands with every decoding method"
    SERVING = "serve"
    PYTHON = "Python only"


@dataclass(frozen=True, slots=True)
class Setting(Field):
    """Declaration of one setting, next to its type and default.

    `ge`, `le`: its range. several: a list in one text, separated by commas; the option may be repeated.
    """

    _: KW_ONLY
    group: SettingGroup = SettingGroup.PYTHON
    several: bool = False


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which a model is opened. "auto" and None: Headrace chooses. Names are checked when the model is opened.

    Raises ParamError (a ValueError) for numbers that are none, or out of their range; numpy's are converted.
    """

    dtype: Annotated[str, Setting("auto, float64, float32, bfloat16 or float16", group=SettingGroup.OPENING)] = "auto"
    device: Annotated[str, Setting("auto, cpu, cuda or cuda:N", group=SettingGroup.OPENING)] = "auto"
    backend: Annotated[str, Setting("auto, native or torch", group=SettingGroup.OPENING)] = "auto"
    threads: Annotated[int | None, Setting("CPU threads", group=SettingGroup.OPENING, ge=1)] = None
    max_model_len: Annotated[
        int | None, Setting("Context in tokens, answer included (default: the model's own)", group=SettingGroup.OPENING, ge=1)
    ] = None
    rope: Annotated[
        str | None,
        Setting(
            "Rotary scaling for a longer context, such as yarn:4 or linear:2 (default: the model's own)",
            group=SettingGroup.OPENING,
        ),
    ] = None
    pp: Annotated[int, Setting("Pipeline stages: the layers run in this many processes", group=SettingGroup.OPENING, ge=1)] = 1
    stages: Annotated[
        str | None,
        Setting("Layers of each pipeline stage, such as 14,16 (default: equal weights)", group=SettingGroup.OPENING),
    ] = None
    stage_hosts: Annotated[
        str | None,
        Setting(
            "Hosts of the first pipeline stages (headrace rank), HOST:PORT separated by commas; the last stage runs here",
            group=SettingGroup.OPENING,
        ),
    ] = None
    key_file: Annotated[
        str | Path | None,
        Setting("File with the key of links to other hosts, that only its user can read", group=SettingGroup.OPENING),
    ] = None
    kv_cache_memory: Annotated[
        int | str | None,
        Setting(
            "Upper limit of the KV cache, such as 2GiB (default: 2048 tokens per sequence, at least one context)",
            group=SettingGroup.OPENING,
        ),
    ] = None
    kv_dtype: Annotated[
        str, Setting("Number format of the KV cache: auto, bfloat16, int8, int4, or a dtype", group=SettingGroup.OPENING)
    ] = "auto"
    kv_store: Annotated[
        str | Path | None,
        Setting(
            "Folder that keeps the KV cache of long prompts for the next start; private to its user",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    kv_store_size: Annotated[
        int | str | None,
        Setting("Upper limit of the folder of --kv-store, such as 20GiB (default: 8GiB)", group=SettingGroup.GENERATING),
    ] = None
    quantize: Annotated[str | None, Setting("Quantise float weights at load: int8 or int4", group=SettingGroup.OPENING)] = None
    activations: Annotated[
        str,
        Setting(
            "Quantisation of activations for integer weights: group (a scale per 32 values), token (per row), "
            "split (outliers apart), tensor (static scales of the folder); auto: as the folder says, otherwise "
            "group",
            group=SettingGroup.OPENING,
        ),
    ] = "auto"
    draft: Annotated[
        str | Path | None,
        Setting(
            "Draft model: a smaller model with the same vocabulary, or a folder of trained heads",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    speculate: Annotated[
        str | None,
        Setting(
            "Drafter: auto, ngram, suffix, lookahead, jacobi, draft, heads, self, blocks or off. The native core "
            "gives the same output with each of them; in torch near ties may differ, and --verification rejection"
            " or block samples other outputs",
            group=SettingGroup.GENERATING,
        ),
    ] = "auto"
    draft_tokens: Annotated[
        int | None,
        Setting("Tokens of a draft (default: chosen by measuring)", group=SettingGroup.GENERATING, ge=1, le=16),
    ] = None
    draft_vocab: Annotated[
        int | None,
        Setting(
            "Number of frequent tokens that the draft model chooses from (default: 49152; 0: all)",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    tp: Annotated[
        int,
        Setting(
            "Processes that divide each layer of the model: 1, 2, 4 or 8, with --threads each (tensor parallelism)",
            group=SettingGroup.GENERATING,
        ),
    ] = 1
    offload: Annotated[
        bool,
        Setting(
            "Keep weights that do not fit in memory on disk, and read them in each step; for trying a model, not for serving",
            group=SettingGroup.GENERATING,
        ),
    ] = False
    cascade: Annotated[
        str | Path | None,
        Setting(
            "Smaller model with the same vocabulary for a cascade by token, with --cascade-threshold",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    exits: Annotated[
        str | Path | None,
        Setting(
            "Folder of exits that train-heads --kind exit wrote for MODEL, used with --exit-threshold",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    exit_state: Annotated[
        str,
        Setting(
            "Layers above an exit: computed later (deferred), or K and V made from the exit's hidden state (propagate)",
            group=SettingGroup.GENERATING,
        ),
    ] = DEFERRED
    exit_layers: Annotated[
        str | None,
        Setting(
            "Exits in use, by the layers below them, as 10,20, or all (default: the one that drafts best)",
            group=SettingGroup.GENERATING,
        ),
    ] = None
    adapter: Annotated[
        str | None,
        Setting(
            "Adapters (LoRA) of MODEL: NAME=FOLDER of peft, or NAME=FILE.gguf; may be repeated",
            group=SettingGroup.GENERATING,
            several=True,
        ),
    ] = None
    max_lora_rank: Annotated[
        int, Setting("Most rows of an adapter's matrix; others are refused", group=SettingGroup.GENERATING, ge=1, le=256)
    ] = 64
    amateur: Annotated[
        str | Path | None,
        Setting(
            "Smaller model with the same vocabulary, for contrastive decoding and speculative cascades",
            group=SettingGroup.DECODING,
        ),
    ] = None
    parse_special: Annotated[
        bool,
        Setting(
            "Read names of control tokens in messages and documents as control tokens; for trusted content only",
            group=SettingGroup.DECODING,
        ),
    ] = False
    max_num_seqs: Annotated[int, Setting("Most sequences in a batch", group=SettingGroup.SERVING, ge=1)] = 32
    max_num_batched_tokens: Annotated[int | None, Setting("Most tokens of a step", group=SettingGroup.SERVING, ge=1)] = None
    classifier: Annotated[
        str | Path | None,
        Setting("Folder that train-classifier wrote for MODEL; enables /v1/classify", group=SettingGroup.SERVING),
    ] = None
    enable_prefix_caching: Annotated[bool, Setting("Reuse K and V of equal prompt beginnings")] = True
    seed: Annotated[int | None, Setting("Source of seeds for requests without one", ge=-(2**63), le=2**64 - 1)] = None
    preset: Annotated[str, Setting("Default for tokens of a step: offline (2048) or online (512, shorter pauses)")] = "offline"
    policy: Annotated[str, Setting("Batching: continuous or static")] = "continuous"

    def __post_init__(self) -> None:
        check(self)

    @property
    def early_exit(self) -> dict[str, Any]:
        """The settings of early exit by name; empty without exits."""
        if self.exits is None:
            return {}
        several = {} if self.exit_layers is None else {"exit_layers": self.exit_layers}
        return {"exits": self.exits, "exit_state": self.exit_state} | several

    @property
    def companions(self) -> list[str | Path]:
        """The other models that are opened together with the target."""
        return [model for model in (self.draft, self.amateur, self.cascade) if model is not None]

    @property
    def propagates(self) -> bool:
        """Whether the layers above an early exit take K and V from the row that exited."""
        return self.exit_state == PROPAGATE


def option_settings(*groups: SettingGroup, of: type[msgspec.Struct] = ModelSettings) -> tuple[Declared, ...]:
    """The declared settings that commands of these groups offer; without groups all that any command offers."""
    wanted = groups or tuple(group for group in SettingGroup if group is not SettingGroup.PYTHON)
    return tuple(one for one in declared(of) if isinstance(one.field, Setting) and one.field.group in wanted)


def _option(default: Any, help: str, least: float | None = None) -> Any:
    """A limit that is an option of `serve`; `least`: its smallest value."""
    return field(default=default, metadata={"help": help, "min": least})


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server. A request above a limit is refused with what to change."""

    body: int = _option(4 << 20, "Bytes of a body.", 1)
    file: int = _option(100 << 20, "Bytes of an upload.", 1)
    n: int = _option(16, "Answers to a prompt.", 1)
    prompts: int = _option(128, "Prompts of a completion request.", 1)
    max_tokens: int | None = _option(None, "Tokens of an answer (default: the context).", 1)
    logprobs: int = _option(20, "Alternatives per token.", 0)
    stop: int = _option(16, "Stop strings.", 0)
    deadline: float | None = _option(None, "Deadline in seconds of requests that set none.", 0.001)
    priority: int = _option(0, "Lowest priority number that a request may set; lower numbers run first.")
    connections: int = _option(1024, "Open requests with a valid key.", 1)
    anonymous: int = _option(256, "Connections of one address without a valid key.", 1)
    bodies: int = _option(256 << 20, "Bytes of all arriving bodies together.", 1)
    audio_bytes: int = _option(25 << 20, "Bytes of a sound file.", 1)
    audio_seconds: int = _option(3600, "Seconds of a sound file.", 1)
    audio_memory: int = _option(1 << 30, "Bytes of all sound files that are transcribed together.", 1)
    body_seconds: float = 30.0  # until a whole body has arrived
    header: int = 64 << 10  # bytes of a request's head
    header_seconds: float = 10.0  # until a whole head has arrived
    send_seconds: float = 60.0  # a client may leave sent bytes unread for so long
    choices: int = 128  # prompts times n
    inputs: int = 2048  # texts of one /v1/embeddings request
    stop_chars: int = 256  # characters of a stop string
    files: int = 10_000  # stored uploads
    stored: int = 2 << 30  # bytes of all stored uploads
    batch_lines: int = 50_000
    batches: int = 1_000  # stored batches; those that have ended and have no files any more make room
    batch_bytes: int = 2 << 30  # of all stored batches, requests and answers
    responses: int = 1_000  # stored responses; the oldest make room
    response_bytes: int = 1 << 30  # of all stored responses
