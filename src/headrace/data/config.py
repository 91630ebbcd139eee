"""Plain data: the sizes of a model (`ModelConfig`), and the limits of an engine (`EngineConfig`)."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.

    scaling: none, linear, llama3 (Llama 3.1's frequency bands), yarn, or divisors (one per frequency).
    dim: rotated part of a head, None for all of it. interleaved: pairs (2i, 2i+1) instead of (i, i + dim/2).
    short: divisors within original_context (longrope), see `ModelConfig.within`. amplitude: factor of cos and sin. growth:
    queries are multiplied by 1 + growth * ln(1 + position // original_context).
    """

    theta: float = 10000.0
    dim: int | None = None
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    interleaved: bool = False
    divisors: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    amplitude: float = 1.0
    growth: float = 0.0


def _within(rope: RopeConfig, context: int | None) -> RopeConfig:
    is_short = rope.short and context is not None and context <= rope.original_context
    return replace(rope, divisors=rope.short) if is_short else rope


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Sizes of one layer.

    ffn: intermediate width of the MLP. window: attention window in tokens, None for all. rope: None for no rotation.
    kv_from: number of the earlier layer whose K and V the layer reads (cross-layer attention), None if it has its own.
    """

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    window: int | None = None
    rope: RopeConfig | None = None
    kv_from: int | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads (not always hidden_size)."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> dict[str, int]:
        """Widths of the projections that the layer computes, by name."""
        own = {} if self.kv_from is not None else {"k": self.kv_size, "v": self.kv_size}
        return {"q": self.q_size} | own


@dataclass(frozen=True, slots=True)
class Audio:
    """Input of an encoder that reads sound: windows of `rows` log-mel rows of `bins` values.

    Two convolutions over `taps` neighbouring rows make the rows of the first layer; `strides` are the steps between their
    outputs.
    """

    bins: int
    rows: int
    taps: int = 3
    strides: tuple[int, ...] = (1, 2)

    @property
    def positions(self) -> int:
        """Rows of the encoder's layers for one window."""
        return self.rows // math.prod(self.strides)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of a model, from a Hugging Face config.json or GGUF metadata.

    architecture: HF model_type, a row of models.families. out_bias: bias of the attention's output projection.
    qk_norm: query and key heads are normed. wide_qk_norm: all queries of a row are normed as one vector, and its keys as
    another. attn_scale: None for head_dim ** -0.5. activation: of the MLP, if a family has several. gated: the MLP has a gate.
    encoder: attention is bidirectional; prompts are fed in one step, and nothing is generated. token_types: rows of BERT's
    token type table. separator: the token after which a text's tokens have the second type; None: all have the first.
    mask_id: mask token of a model that fills in blocks.
    source: the encoder of an encoder-decoder. audio: its input, if it reads sound. start: first token of its outputs. never:
    token that it never writes (Marian's padding). head_scale, head_bias: of the output head; the bias is that of a tied head.
    buckets, bucket_distance: relative positions of T5 and MPNet; all distances from bucket_distance on share the last bucket.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    norm_eps: float = 1e-5
    tied_head: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    wide_qk_norm: bool = False
    attn_scale: float | None = None
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    encoder: bool = False
    token_types: int = 0
    separator: int | None = None
    mask_id: int | None = None
    source: "ModelConfig | None" = None
    head_scale: float = 1.0
    head_bias: bool = False
    start: int = 0
    never: int | None = None
    activation: str = ""
    gated: bool = False
    buckets: int = 0
    bucket_distance: int = 0
    audio: Audio | None = None

    def __post_init__(self) -> None:
        for at, layer in enumerate(self.layers):
            if layer.kv_from is not None:
                self._check_kv_from(at, layer.kv_from)

    def _check_kv_from(self, at: int, source: int) -> None:
        """Raise ValueError if layer `at` cannot read the K and V of layer `source`."""
        if not 0 <= source < at:
            raise ValueError(f"layer {at} has kv_from {source}, which is no earlier layer; name a layer below {at}")
        layer, read = self.layers[at], self.layers[source]
        if read.kv_from is not None:
            raise ValueError(
                f"layer {at} has kv_from {source}, and layer {source} reads the K/V of layer {read.kv_from} itself; "
                f"name a layer with K/V of its own"
            )
        own, other = ((each.kv_heads, each.head_dim) for each in (layer, read))
        if own != other:
            raise ValueError(
                f"layer {at} has kv_from {source}, whose K/V are {other[0]} heads of {other[1]}, and its own sizes are "
                f"{own[0]} heads of {own[1]}; give both layers the same sizes"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def reads_sound(self) -> bool:
        """Whether it is an encoder-decoder whose sources are windows of sound."""
        return self.source is not None and self.source.audio is not None

    def source_positions(self, context: int) -> int:
        """Positions of the longest source of an encoder-decoder with this context; 0 for other models."""
        if self.source is None:
            return 0
        return context if self.source.audio is None else self.source.audio.positions

    def shared_window(self, context: int) -> int:
        """Number of tokens that the window layers' own block table keeps for contexts of `context` tokens: the largest window
        below that, or of all windows if K/V differ in size, as a pool holds K/V of one size.

        0 if all layers stay in one table: there is no such window, rows see what follows them (encoders), or a layer outside
        the window reads the K/V of a layer with it, which gives blocks up.
        """
        if self.encoder or self.source is not None:
            return 0
        below = context if len(self.kv_sizes) == 1 else math.inf
        window = max((each.window for each in self.layers if each.window is not None and each.window < below), default=0)
        slides = [each.window is not None and each.window <= window for each in self.layers]
        return 0 if any(slides[self.kv_layer(at)] and not slides[at] for at in range(self.num_layers)) else window

    @property
    def kv_layers(self) -> list[int]:
        """Numbers of the layers with K and V of their own, ascending."""
        return [at for at, layer in enumerate(self.layers) if layer.kv_from is None]

    @property
    def kv_sizes(self) -> set[tuple[int, int]]:
        """The K/V sizes of the layers: number of heads, and head size."""
        return {(layer.kv_heads, layer.head_dim) for layer in self.layers}

    @property
    def full_layer(self) -> LayerConfig:
        """The first layer that attends to all tokens; the first layer if each has a window."""
        return next((layer for layer in self.layers if layer.window is None), self.layers[0])

    @property
    def shares_kv(self) -> bool:
        """Whether a layer reads the K and V of another."""
        return any(layer.kv_from is not None for layer in self.layers)

    def kv_layer(self, layer: int) -> int:
        """Number of the layer whose K and V a layer reads: its own, or `kv_from`."""
        source = self.layers[layer].kv_from
        return layer if source is None else source

    def of_layers(self, numbers: Sequence[int]) -> "ModelConfig":
        """The config with only these layers (ascending), and `kv_from` by their new numbers.

        Raises ValueError if one of them reads the K/V of a layer that is left out.
        """
        layers = []
        for number in numbers:
            layer = self.layers[number]
            if layer.kv_from is not None and layer.kv_from not in numbers:
                raise ValueError(f"layer {number} reads the K/V of layer {layer.kv_from}; keep them together")
            layers.append(layer if layer.kv_from is None else replace(layer, kv_from=numbers.index(layer.kv_from)))
        return replace(self, layers=tuple(layers))

    def within(self, context: int | None) -> "ModelConfig":
        """The config for contexts of at most `context` tokens: longrope has its short divisors up to its original context.

        The choice is made once, as other divisors would change the cached keys. None: the model's whole context.
        """
        layers = tuple(replace(layer, rope=layer.rope and _within(layer.rope, context)) for layer in self.layers)
        return replace(self, layers=layers)

    def sharing(self, neighbours: int) -> "ModelConfig":
        """The same model with cross-layer attention: the first of each `neighbours` layers has K and V for all of them.

        Source: Brandon et al. 2024, arXiv 2405.12981.
        """
        firsts = (at - at % neighbours for at in range(self.num_layers))
        layers = (
            replace(layer, kv_from=None if first == at else first)
            for at, (layer, first) in enumerate(zip(self.layers, firsts, strict=True))
        )
        return replace(self, layers=tuple(layers))

    @property
    def kv_share(self) -> int:
        """The number of neighbours with which `sharing` made the config, 1 if each layer has its own K and V.

        Raises ValueError if the layers read the K and V of others in another pattern.
        """
        if not self.shares_kv:
            return 1
        share = next((at for at in range(1, self.num_layers) if self.layers[at].kv_from is None), self.num_layers)
        if self.sharing(share) != self:
            raise ValueError(f"the layers of this {self.architecture} model do not share K and V by groups of neighbours")
        return share

    @property
    def each_layer(self) -> LayerConfig:
        """The sizes of a layer, if all layers are equal. Raises ValueError otherwise."""
        if len(set(self.layers)) != 1:
            why = ", as some share K and V of others: begin with its original" if self.shares_kv else ""
            raise ValueError(f"the layers of this {self.architecture} model are not all alike{why}")
        return self.layers[0]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of the scheduler.

    policy: continuous or static batching. longer: name of the setting that allows a longer context, empty if none does.
    whole: of encoders, a prompt is fed in one step and its prefix is not looked up in the cache.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    policy: str = "continuous"
    longer: str = ""
    whole: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.policy not in ("continuous", "static"):
            raise ValueError(f"unknown policy {self.policy!r}; choose continuous or static")

    @classmethod
    def preset(
        cls, name: str, max_model_len: int, max_num_seqs: int = 32, policy: str = "continuous", budget: int | None = None
    ) -> "SchedulerConfig":
        """Limits by name: online has short steps and low inter-token latency, offline large steps and high throughput.

        budget: tokens of a step, in place of the preset's.
        """
        budgets = {"online": 512, "offline": 2048}
        if name not in budgets:
            raise ValueError(f"unknown preset {name!r}; choose online or offline")
        return cls(max_num_seqs, budgets[name] if budget is None else budget, max_model_len, policy)

    def for_encoder(self) -> "SchedulerConfig":
        """The same limits with room for a whole context in one step."""
        return replace(self, whole=True, max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_model_len))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV pool: blocks, tokens per block, and whether prefixes are cached for later requests.

    window: number of tokens that the layers with a table and a pool of their own see, 0 if there are none.
    window_blocks: blocks of that pool.
    """

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True
    window: int = 0
    window_blocks: int = 0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(num_blocks=256))


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text such as "2GiB", "500MB", "1.5g". Raises ValueError."""
    if isinstance(value, int):
        size = float(value)
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]i?)?b?\s*", value.lower())
        if match is None:
            raise ValueError(f"{value!r} is not a size; write a number of bytes or, say, 2GiB")
        size = float(match[1]) * UNITS[match[2] or ""]
    if size <= 0:
        raise ValueError(f"a memory size must be above 0, not {value!r}")
    return int(size)
