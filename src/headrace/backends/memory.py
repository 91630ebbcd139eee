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
    """

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    summary: str
    spare: int
    longer: str = ""
    scratch: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all pools."""
        return self.kv_bytes + self.scratch


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
) -> MemoryPlan:
    """Size the KV pool in blocks of `block_size` tokens.

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
    # Block tables of a sequence: its tokens, and the source of an encoder-decoder.
    sides = 1 if config.source is None else 2
    whole = sides * -(-context // block_size)
    if kv_cache_memory is None:
        budget = min(int(free * SHARE), sides * usual_blocks(context, block_size, max_num_seqs) * block_bytes)
    else:
        budget = parse_bytes(kv_cache_memory)
        if budget > free:
            raise ValueError(f"kv_cache_memory is {gib(budget)} and {gib(free)} are free; lower it to {gib(int(free * 0.9))}")
    blocks = budget // block_bytes
    if blocks < whole:
        fits = blocks // sides * block_size
        if max_model_len is not None or fits < min(256, context):
            raise ValueError(
                f"a context of {context} tokens needs {gib(whole * block_bytes)} of KV cache and {gib(budget)} are set aside; "
                f"use max_model_len={max(fits, block_size)} or kv_cache_memory={whole * block_bytes}"
            )
        context = fits
    kv_bytes = blocks * block_bytes
    summary = f"KV cache of at most {gib(kv_bytes)} for {blocks * block_size:,} tokens, context {context:,}"
    if config.encoder:  # its K and V last for a step
        summary = f"texts of at most {context:,} tokens"
    if scratch:
        summary += f", sources encoded in {gib(scratch)}"
    longer = "" if context == config.max_position else "kv_cache_memory" if max_model_len is None else "max_model_len"
    return MemoryPlan(blocks, context, kv_bytes, summary, free - kv_bytes, longer, scratch)


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
