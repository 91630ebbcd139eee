"""The memory plan: number of KV blocks and context, computed before anything large is allocated."""

from dataclasses import dataclass

from headrace.data.config import ModelConfig, parse_bytes
from headrace.data.plan import MAX_NODES

# Default limit of the KV cache, as a share of free memory.
SHARE = 0.25
# Tokens per sequence of a full batch: a question, its documents and its answer, not the whole context.
TOKENS = 2048


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """KV blocks and the context that they allow.

    spare: free bytes that are left. summary: one line for the user. longer: the setting that would allow a longer context,
    empty if the context is the model's own. scratch: bytes of the pools in which an encoder-decoder's sources are encoded.
    window, window_blocks: tokens and blocks of the window layers' pool, 0 if there is none; kv_bytes counts it, too.
    """

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    summary: str
    spare: int
    longer: str = ""
    scratch: int = 0
    window: int = 0
    window_blocks: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return self.kv_bytes + self.scratch


@dataclass(frozen=True, slots=True)
class WindowPool:
    """Pool of the layers with a window of at most `window` tokens.

    blocks: number of blocks that is always enough. needed: for any context, as these K/V do not fit the other pool.
    """

    window: int
    block_bytes: int
    blocks: int
    needed: bool = False


def window_blocks(window: int, block_size: int, max_num_seqs: int, chunk: int) -> int:
    """Blocks of the window layers' pool: for each sequence its window, the ends of it and the nodes of a draft, and the tokens
    of a step. What running sequences leave holds the windows of cached prefixes."""
    return max_num_seqs * (-(-(window + MAX_NODES) // block_size) + 2) + -(-chunk // block_size)


def check_weights_fit(need: int, free: int, *names: str, narrower: str = "") -> None:
    """Raise ValueError unless `need` bytes of weights of the models `names` fit in `free` bytes.

    narrower: a setting with which they take fewer bytes, for the message; empty if there is none.
    """
    if need > free * 0.95:
        verb, whose = ("needs", "its") if len(set(names)) == 1 else ("need", "their")
        raise ValueError(
            f"{' and '.join(dict.fromkeys(names))} {verb} {gib(need)} for {whose} weights and {gib(free)} are free; "
            f"choose a smaller model{narrower and f' or {narrower}'}, or free memory"
        )


def check_context(max_model_len: int | None, config: ModelConfig) -> None:
    """Raise ValueError if the context is longer than the model's positions."""
    if max_model_len is not None and max_model_len > config.max_position:
        raise ValueError(
            f"max_model_len {max_model_len} is larger than the model's context of {config.max_position} tokens; lower it"
        )


def plan(
    config: ModelConfig,
    *,
    block_bytes: int,
    block_size: int,
    free: int,
    max_num_seqs: int,
    max_model_len: int | None = None,
    kv_cache_memory: int | str | None = None,
    scratch: int = 0,
    window: WindowPool | None = None,
) -> MemoryPlan:
    """Size the KV pool in blocks of `block_size` tokens, and that of window layers.

    free: bytes after the weights, of which `scratch` are taken. The pool takes `kv_cache_memory`, by default `usual_blocks` but
    no more than 25 % of free memory. A requested context must fit; the model's own is shortened to the pool. Raises ValueError.
    """
    if scratch and scratch >= free:
        raise ValueError(
            f"sources are encoded in {gib(scratch)}, and {gib(max(free, 0))} are free next to the weights; "
            "lower max_model_len, or free memory"
        )
    free -= scratch
    context = max_model_len or config.max_position
    check_context(max_model_len, config)
    whole = _sequence_blocks(config, context, block_size)
    if kv_cache_memory is None:
        usual = usual_blocks(context, block_size, max_num_seqs)
        if sources := config.source_positions(context):
            usual += usual_blocks(sources, block_size, max_num_seqs)
        budget = min(int(free * SHARE), _pools(usual, block_bytes, window))
    else:
        budget = parse_bytes(kv_cache_memory)
        if budget > free:
            raise ValueError(f"kv_cache_memory is {gib(budget)} and {gib(free)} are free; lower it to {gib(int(free * 0.9))}")
    blocks = _blocks_in(budget, block_bytes, window, max(whole, usual_blocks(context, block_size, max_num_seqs)))
    if blocks < whole:
        fits = _longest_context(config, blocks, block_size)
        if max_model_len is not None or fits < min(256, context):
            need = _pools(whole, block_bytes, window)
            raise ValueError(
                f"a context of {context} tokens needs {gib(need)} of KV cache and {gib(budget)} are set aside; "
                f"use max_model_len={max(fits, block_size)} or kv_cache_memory={need}"
            )
        context = fits
    kv_bytes = _pools(blocks, block_bytes, window)
    if window is not None and context <= window.window and not window.needed:  # no row is farther back than the window
        window = None
    in_windows = 0 if window is None else min(blocks, window.blocks)
    summary = f"KV cache of at most {gib(kv_bytes)} for {blocks * block_size:,} tokens, context {context:,}"
    if window is not None:
        full, windows = gib(blocks * block_bytes), gib(in_windows * window.block_bytes)
        summary += f" ({full} of layers that see all tokens, {windows} of layers that see {window.window:,})"
    if config.encoder:  # its K and V last for a step
        summary = f"texts of at most {context:,} tokens"
    if scratch:
        summary += f", sources encoded in {gib(scratch)}"
    longer = "" if context == config.max_position else "kv_cache_memory" if max_model_len is None else "max_model_len"
    reach = 0 if window is None else window.window
    return MemoryPlan(blocks, context, kv_bytes, summary, free - kv_bytes, longer, scratch, reach, in_windows)


def _pools(blocks: int, block_bytes: int, window: WindowPool | None) -> int:
    """Bytes of both pools with `blocks` blocks of tokens."""
    return blocks * block_bytes + (0 if window is None else min(blocks, window.blocks) * window.block_bytes)


def _blocks_in(budget: int, block_bytes: int, window: WindowPool | None, most: int) -> int:
    """Blocks of tokens for which both pools fit in `budget`; at most `most` if blocks of tokens take no memory."""
    if window is None:
        return budget // block_bytes
    rest = budget - window.blocks * window.block_bytes
    if rest < window.blocks * block_bytes:
        return budget // (block_bytes + window.block_bytes)
    return rest // block_bytes if block_bytes else most


def _sequence_blocks(config: ModelConfig, context: int, block_size: int) -> int:
    """Blocks of one sequence of `context` tokens: its own, and those of the longest source of an encoder-decoder."""
    return -(-context // block_size) - (-config.source_positions(context) // block_size)


def _longest_context(config: ModelConfig, blocks: int, block_size: int) -> int:
    """Tokens of the longest context whose sequence, with its source, fits in `blocks`."""
    if config.source is None:
        return blocks * block_size
    if config.source.audio is None:
        return blocks // 2 * block_size
    return max(0, blocks - -(-config.source.audio.positions // block_size)) * block_size


def usual_blocks(context: int, block_size: int, max_num_seqs: int) -> int:
    """Default number of blocks: 2,048 tokens for each sequence of a full batch, at least one context and the nodes of a draft.

    Contrastive search and block filling verify nodes after the last token of the context, too.
    """
    longest, usual = -(-(context + MAX_NODES) // block_size), max_num_seqs * -(-min(context, TOKENS) // block_size)
    return max(longest, usual)


def check_hidden_fits(planned: MemoryPlan, need: int, free: int) -> None:
    """Raise ValueError unless `need` bytes of hidden states for contrastive search fit next to the KV blocks.

    free: bytes free now. KV blocks that were never written still count as free, so the plan's spare bytes are a bound, too.
    """
    room = max(0, min(planned.spare, free))
    if need > room * 0.95:
        smaller = int((planned.kv_bytes + room * 0.9) * planned.kv_bytes / (planned.kv_bytes + need))
        raise ValueError(
            f"contrastive search keeps a hidden state of every token in the cache, {gib(need)}, and {gib(room)} are free; "
            f"leave penalty_alpha out, or open the model with kv_cache_memory={smaller}"
        )


def gib(size: int) -> str:
    """A size in bytes as text with a binary unit."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
