"""Settings: what a model is (`ModelConfig`) and how an engine is run (`EngineConfig`). Plain data."""

import re
from dataclasses import dataclass, field, replace

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions. `scaling` is none | linear | llama3 (Llama 3.1's frequency bands) | divisors (given one by one)."""

    theta: float = 10000.0
    dim: int | None = None  # rotated part of a head; None: all of it
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    interleaved: bool = False  # pairs (2i, 2i+1) instead of (i, i + dim/2)
    divisors: tuple[float, ...] = ()  # scaling "divisors": what each frequency is divided by (GGUF's rope_freqs.weight)


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The numbers of one layer."""

    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the MLP between its matrices
    window: int | None = None  # how many tokens it attends to; None: all
    rope: RopeConfig | None = None  # None: nothing is turned here
    shares: bool = False  # it has no K and V, and reads those of the nearest layer below that has (CLA)

    @property
    def q_size(self) -> int:
        """Width of all query heads together (not always hidden_size)."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.kv_heads * self.head_dim

    @property
    def qkv(self) -> dict[str, int]:
        """The widths of the projections that attention reads."""
        own = {} if self.shares else {"k": self.kv_size, "v": self.kv_size}
        return {"q": self.q_size} | own


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An architecture's numbers, whatever file they came from (HF config.json or GGUF metadata)."""

    architecture: str  # HF model_type, a row of models.families
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    max_position: int
    norm_eps: float = 1e-5
    tied_head: bool = True
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # every query and key head is normed
    attn_scale: float | None = None  # None: head_dim ** -0.5
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    encoder: bool = False  # every token sees every other: prompts are fed whole, and nothing is generated
    token_types: int = 0  # rows of bert's table of token types
    mask_id: int | None = None  # the token that stands for one to be guessed, of models that were trained to fill it in
    source: "ModelConfig | None" = None  # of an encoder-decoder: the encoder, which reads what the decoder writes from
    head_scale: float = 1.0
    head_bias: bool = False  # of a tied head
    start: int = 0  # the token that an output from a source begins with
    never: int | None = None  # a token that is never written (Marian's padding)
    activation: str = ""  # of the MLP, where a family has several
    gated: bool = False  # the MLP has a gate beside it
    buckets: int = 0  # of relative positions (T5)
    bucket_distance: int = 0  # from which on all distances share the last bucket

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kv_layer(self, layer: int) -> int:
        """Whose K and V a layer reads; pools number the layers that have their own."""
        return sum(not each.shares for each in self.layers[: layer + 1]) - 1

    def sharing(self, neighbours: int) -> "ModelConfig":
        """The same model where the first of each so many layers has K and V, and the others read them (cross-layer attention,
        Brandon et al. 2024, https://arxiv.org/abs/2405.12981)."""
        layers = (replace(layer, shares=at % neighbours > 0) for at, layer in enumerate(self.layers))
        return replace(self, layers=tuple(layers))

    @property
    def kv_share(self) -> int:
        """How many neighbours read one layer's K and V, from the first on; 1: each its own."""
        return next((at for at in range(1, self.num_layers) if not self.layers[at].shares), self.num_layers)

    @property
    def each_layer(self) -> LayerConfig:
        """The numbers that all layers have. Raises ValueError where they differ."""
        if len(set(self.layers)) != 1:
            why = ", as some share K and V of others: begin with its original" if self.kv_share > 1 else ""
            raise ValueError(f"the layers of this {self.architecture} model are not all alike{why}")
        return self.layers[0]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy of the scheduler. `online` keeps steps short, `offline` fills them."""

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    policy: str = "continuous"  # continuous | static
    longer: str = ""  # the setting that allows a longer context, where one does
    whole: bool = False  # encoders: a prompt is fed in one step, and nothing is matched

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
        """online: small chunks, low ITL; offline: big steps, most tokens/s. `budget`: tokens of a step, where it is another."""
        budgets = {"online": 512, "offline": 2048}
        if name not in budgets:
            raise ValueError(f"unknown preset {name!r}; choose online or offline")
        return cls(max_num_seqs, budgets[name] if budget is None else budget, max_model_len, policy)

    def for_encoder(self) -> "SchedulerConfig":
        """Whole prompts: any that the context holds fits into a step."""
        return replace(self, whole=True, max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_model_len))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged pool: number of blocks, tokens a block, whether prefixes are shared and kept for later requests."""

    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True


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
