"""The memory plan, made before anything large is allocated: how many KV blocks; what to change when it cannot be."""

from dataclasses import dataclass

from headrace.data.config import ModelConfig, parse_bytes

SHARE = 0.25  # of free memory, for KV at most, unless told otherwise
TOKENS = 2048  # of a sequence of a full batch: what a question, its documents and its answer take, not the whole context


class DoesNotFit(ValueError):  # noqa: N818 - reads as what it says
    """The model or its KV cache does not fit; the message has the numbers and a setting that works."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """KV blocks and the context they allow. `spare`: bytes that were free beside them. `summary`: one line for the user.
    `longer`: the setting that would allow a longer context; empty where it is the model's. `scratch`: bytes of the pools in
    which an encoder-decoder's sources are encoded."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int
    summary: str
    spare: int
    longer: str = ""
    scratch: int = 0

    @property
    def bytes(self) -> int:
        """Of all pools."""
        return self.kv_bytes + self.scratch


def check_weights_fit(need: int, free: int, *names: str, narrower: str = "") -> None:
    """Raise unless weights of `need` bytes, of the models of these names together, fit in `free` bytes. `narrower`: what could
    be asked for instead, by which they take fewer; empty where nothing could."""
    if need > free * 0.95:
        verb, whose = ("needs", "its") if len(set(names)) == 1 else ("need", "their")
        raise DoesNotFit(
            f"{' and '.join(dict.fromkeys(names))} {verb} {gib(need)} for {whose} weights and {gib(free)} are free; "
            f"choose a smaller model{narrower and f' or {narrower}'}, or free memory"
        )


def check_context(max_model_len: int | None, config: ModelConfig) -> None:
    """Raise DoesNotFit if the context is longer than the model's positions."""
    if max_model_len is not None and max_model_len > config.max_position:
        raise DoesNotFit(
            f"max_model_len {max_model_len} is beyond the {config.max_position} positions the model knows; lower it"
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
    """Blocks of `block_size` tokens for the paged pool, given `free` bytes after the weights, of which `scratch` are taken.

    The pool takes `kv_cache_memory`, or `usual_blocks`, but 25 % of free memory at most. A context the caller asked for must
    fit; one he did not ask for is shortened to the pool. Raises DoesNotFit with the numbers.
    """
    if scratch and scratch >= free:
        raise DoesNotFit(
            f"sources are encoded in {gib(scratch)}, and {gib(max(free, 0))} are free beside the weights; "
            "lower max_model_len, or free memory"
        )
    free -= scratch
    context = max_model_len or config.max_position
    check_context(max_model_len, config)
    sides = 1 if config.source is None else 2  # what a sequence has blocks of: its tokens, and its source's
    whole = sides * -(-context // block_size)  # blocks of one sequence of full length
    if kv_cache_memory is None:
        budget = min(int(free * SHARE), sides * usual_blocks(context, block_size, max_num_seqs) * block_bytes)
    else:
        budget = parse_bytes(kv_cache_memory)
        if budget > free:
            raise DoesNotFit(f"kv_cache_memory is {gib(budget)} and {gib(free)} are free; lower it to {gib(int(free * 0.9))}")
    blocks = budget // block_bytes
    if blocks < whole:
        fits = blocks // sides * block_size
        if max_model_len is not None or fits < min(256, context):
            raise DoesNotFit(
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
    """Blocks of a pool whose size nobody chose: 2,048 tokens for each sequence of a full batch (some longer, others shorter),
    and a whole context at least."""
    whole, usual = -(-context // block_size), -(-TOKENS // block_size)
    return max(whole, max_num_seqs * min(whole, usual))


def check_hidden_fits(planned: MemoryPlan, need: int, free: int) -> None:
    """Raise unless the hidden states of contrastive search, `need` bytes, fit beside the KV blocks. `free` bytes are free now,
    where blocks that were never written still count, so that what the plan left over bounds it too."""
    room = max(0, min(planned.spare, free))
    if need > room * 0.95:
        smaller = int((planned.kv_bytes + room * 0.9) * planned.kv_bytes / (planned.kv_bytes + need))
        raise DoesNotFit(
            f"contrastive search keeps a hidden state of every token in the cache, {gib(need)}, and {gib(room)} are free; "
            f"leave penalty_alpha out, or open the model with kv_cache_memory={smaller}"
        )


def gib(size: int) -> str:
    """Bytes for people, in binary units."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
