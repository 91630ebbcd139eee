"""Training of a small model that fills in blocks of masked tokens, and that also writes token by token."""

import json
import math
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headrace.backends.eager.program import play
from headrace.compress.export import CONFIG, hf_config, write_json
from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.families import t5
from headrace.models.layers import Relative
from headrace.models.registry import describe
from headrace.ops.attention import buckets, rotate
from headrace.ops.weights import RelativeWeights
from headrace.runner.record import Segment, record, record_cross
from headrace.training.masked_tasks import END, MASK, Task
from headrace.training.run import Budget, Interrupt, Run, TrainingConfig, exclusive, record_job
from headrace.weights.loader import Allocator, stored_tensors

CONTEXT = 256
# Rows of a step: 600 steps of the small sizes take less than a minute on two cores, for texts of any length.
ROWS = 1536
WARM_UP_STEPS = 20
BETAS = (0.9, 0.98)
# Standard deviation of the random weights.
SPREAD = 0.05
WORK = "work"


@dataclass(eq=False, slots=True)
class Batch:
    """`texts` texts of one length, whose rows follow each other.

    ids, positions: [texts * rows]. wanted: [texts * rows], the token to predict, −1 for none.
    seen: [rows, rows] bool, attention mask of each text. source: what an encoder reads.
    read: K and V of the source by decoder layer. taps, memo: storage of the ops that run on the batch.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    texts: int
    seen: torch.Tensor
    source: "Batch | None" = None
    read: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    taps: dict[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)


def whole(ids: torch.Tensor) -> Batch:
    """Return the batch of an encoder: ids [texts, rows] with bidirectional attention and nothing to predict."""
    texts, rows = ids.shape
    none = torch.full((texts * rows,), -1)
    return Batch(ids.flatten(), torch.arange(rows).repeat(texts), none, texts, torch.ones(rows, rows, dtype=torch.bool))


def answer_tokens(task: Task, block: int) -> int:
    """Return the number of tokens of the longest answer with its end token, rounded up to whole blocks."""
    return -(-(task.longest + 1) // block) * block


def rows_of(task: Task, block: int) -> int:
    """Return the largest number of rows of a text: its prompt, its answer, and the copies of the answer's blocks."""
    return max(task.sizes) + 2 * answer_tokens(task, block)


def make_batch(
    task: Task, block: int, texts: int, rng: random.Random, generator: torch.Generator, *, sources: bool = False
) -> Batch:
    """Draw `texts` prompts of one length with their answers, and mask a copy of each block.

    sources: the prompts are an encoder's sources, and the answers begin with the end token.
    """
    mask, end = task.id_of(MASK), task.id_of(END)
    size, answers = rng.choice(task.sizes), answer_tokens(task, block)
    pairs = [task.pair(rng, size) for _ in range(texts)]
    prompts = torch.tensor([prompt for prompt, _ in pairs])
    given = torch.tensor([[*answer, *[end] * (answers - len(answer))] for _, answer in pairs])
    known = torch.cat((torch.full((texts, 1), end) if sources else prompts, given), 1)
    size = known.shape[1] - answers
    copy = known[:, size:].reshape(texts, -1, block)
    rate = torch.rand(copy.shape[:2], generator=generator)[..., None]
    noise = torch.rand(copy.shape, generator=generator)
    # Masks at least one token of each block.
    masked = (noise < rate) | (noise == noise.amin(-1, keepdim=True))
    guessed = torch.where(masked, copy, -1).flatten(1)
    following = torch.cat((torch.full((texts, size - 1), -1), known[:, size:], torch.full((texts, 1), -1)), 1)
    positions = torch.arange(size + answers)
    return Batch(
        ids=torch.cat((known, torch.where(masked, mask, copy).flatten(1)), 1).flatten(),
        positions=torch.cat((positions, positions[size:])).repeat(texts),
        wanted=torch.cat((following, guessed), 1).flatten(),
        texts=texts,
        seen=block_causal(size, answers, block),
        source=whole(prompts) if sources else None,
    )


def block_causal(prompt: int, answers: int, block: int) -> torch.Tensor:
    """Return the attention mask [rows, rows] bool of `prompt` + `answers` known tokens and the copied blocks."""
    known = prompt + answers
    # Position of a known token; of a copied token, the first position of its block.
    position = torch.cat((torch.arange(known), prompt + torch.arange(answers) // block * block))
    copy = torch.arange(known + answers) >= known
    causal = ~copy[None, :] & (position[None, :] <= position[:, None] - copy[:, None].long())
    same = copy[None, :] & copy[:, None] & (position[None, :] == position[:, None])
    return causal | same


@dataclass(frozen=True, slots=True)
class MaskedConfig(TrainingConfig):
    """Settings of a training of a masked model.

    block: tokens of a block. encoder: layers of an encoder that reads the prompt; 0 for a decoder alone.
    width: hidden size. batch: texts of a step, None for about ROWS rows. rate: highest learning rate.
    """

    block: int = 8
    layers: int = 4
    encoder: int = 0
    width: int = 96
    heads: int = 4
    steps: int = 600
    batch: int | None = None
    rate: float = 3e-3

    def rate_at(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine to 0."""
        return self.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * (1 + math.cos(math.pi * step / self.steps)) / 2


@dataclass(frozen=True, slots=True)
class TrainableModel:
    """A model that runs op by op with gradients: its recorded layers; for an encoder-decoder also the encoder's layers and the
    cross-attention projections (`stores`)."""

    model: Model
    layers: tuple[Segment, ...]
    encoder: tuple[Segment, ...] = ()
    stores: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, model: Model) -> "TrainableModel":
        layers = record(model, embeds=False).layers
        if model.encoder is None:
            return cls(model, layers)
        return cls(model, layers, record(model.encoder, embeds=False).layers, record_cross(model).layers)

    def logits(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocabulary] of the rows [n] of a batch."""
        if batch.source is not None:
            assert self.model.encoder is not None, "only an encoder-decoder has sources"
            memory = self._run(self.encoder, self.model.encoder.embed(batch.source), batch.source)
            self._run(self.stores, memory, batch)
        logits: torch.Tensor = self.model.head(self._run(self.layers, self.model.embed(batch), batch)[rows])
        return logits

    def _run(self, segments: tuple[Segment, ...], x: torch.Tensor, batch: Batch) -> torch.Tensor:
        attend = partial(attention, heads=self.model.config.each_layer.heads)
        for segment in segments:
            ctx: Any = batch
            x = play(segment, [0] * len(segment.nodes), 0, x, ctx, {"attention": attend, "store": store})
        return x


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    ctx: Batch,
    layer: int,
    rope: Any = None,
    scale: float | None = None,
    causal: bool = True,
    source: bool = False,
    bias: RelativeWeights | None = None,
    *,
    heads: int,
    **options: Any,
) -> torch.Tensor:
    """The op `attention` over whole texts, with gradients; the batch's mask replaces `causal`.

    For models with as many K/V heads as Q heads. Raises ValueError for windows, caps, sinks and norms of heads.
    """
    if unsupported := [name for name, value in options.items() if value is not None]:
        raise ValueError(f"a model with {', '.join(unsupported)} is not trained here")

    def split(x: torch.Tensor, rotated: bool) -> torch.Tensor:
        x = x.view(len(x), heads, -1)
        # `rotate` reads the positions of the context alone.
        x = rotate(x, rope, ctx) if rotated and rope is not None else x  # type: ignore[arg-type]
        return x.view(ctx.texts, -1, heads, x.shape[-1]).transpose(1, 2)

    keys, values = ctx.read[layer] if source else (k, v)
    assert keys is not None
    assert values is not None
    mask = None if source else ctx.seen if bias is None else _biased_mask(ctx, bias)
    mixed = scaled_dot_product_attention(split(q, True), split(keys, not source), split(values, False), mask, scale=scale)
    return mixed.transpose(1, 2).reshape(len(q), -1)


def _biased_mask(ctx: Batch, bias: RelativeWeights) -> torch.Tensor:
    """Relative position bias of a text's rows, [heads, rows, rows], −inf where the mask hides a row."""
    if bias not in ctx.memo:
        positions = ctx.positions[: len(ctx.seen)]
        bucket = buckets(positions[None, :] - positions[:, None], len(bias.weight), bias.distance, bias.both)
        ctx.memo[bias] = bias.weight[bucket].permute(2, 0, 1).masked_fill(~ctx.seen, -math.inf)
    mask: torch.Tensor = ctx.memo[bias]
    return mask


def store(k: torch.Tensor, v: torch.Tensor, ctx: Batch, layer: int, **options: Any) -> torch.Tensor:
    """The op `store`: keeps K and V of a source for the decoder layer that reads them."""
    ctx.read[layer] = k, v
    return k


def new_model(task: Task, config: MaskedConfig) -> Model:
    """Return a llama, or a T5 if the config has an encoder, with random weights and the task's vocabulary."""
    model = describe(_encoder_decoder(task, config) if config.encoder else _decoder(task, config))
    generator = torch.Generator().manual_seed(config.seed)
    for _, holder in model.holders():
        holder.create(Allocator(torch.float32))
        for name in holder.params():
            weight = getattr(holder, name)
            # The relative position bias is all that a T5 knows of positions.
            spread = 1.0 if isinstance(holder, Relative) else SPREAD
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=spread, generator=generator)
        holder.finish()
    return model


def _decoder(task: Task, config: MaskedConfig) -> ModelConfig:
    layer = LayerConfig(config.heads, config.heads, config.width // config.heads, 2 * config.width, rope=RopeConfig())
    sizes = task.tokenizer.get_vocab_size(), config.width
    return ModelConfig("llama", *sizes, (layer,) * config.layers, CONTEXT, mask_id=task.id_of(MASK))


def _encoder_decoder(task: Task, config: MaskedConfig) -> ModelConfig:
    layer = LayerConfig(config.heads, config.heads, config.width // config.heads, 2 * config.width)
    encoder = ModelConfig(
        "t5",
        task.tokenizer.get_vocab_size(),
        config.width,
        (layer,) * config.encoder,
        CONTEXT,
        tied_head=False,
        attn_scale=1.0,
        encoder=True,
        activation="gelu_tanh",
        gated=True,
        buckets=32,
        bucket_distance=128,
    )
    layers, ids = (layer,) * config.layers, {"start": task.id_of(END), "mask_id": task.id_of(MASK)}
    return replace(encoder, layers=layers, encoder=False, source=encoder, **ids)  # type: ignore[arg-type]


def train(
    task: Task, config: MaskedConfig, folder: Path, progress: Progress | None = None, interrupt: Interrupt | None = None
) -> Model:
    """Return a trained model: the same bytes for the same config on the same machine and threads, also after a stop.

    folder: of the training state. Raises ValueError, and KeyboardInterrupt if stopped.
    """
    config.set_threads()
    if config.width % (2 * config.heads):
        raise ValueError(
            f"a width of {config.width} cannot be cut into {config.heads} heads of an even size; choose a multiple"
        )
    record_job(folder, {"task": task.fingerprint, **asdict(config), "threads": None})
    model = new_model(task, config)
    trainable = TrainableModel.of(model)
    run = Run(dict(model.named_parameters()), folder, Budget(steps=config.steps), config.rate_at, betas=BETAS)
    batches = _batches(task, config, run.steps)

    def step(number: int) -> float:
        batch = next(batches)
        rows = (batch.wanted >= 0).nonzero()[:, 0]
        loss = cross_entropy(trainable.logits(batch, rows), batch.wanted[rows])
        loss.backward()
        return loss.item()

    run.train(step, progress, interrupt)
    return model


def _batches(task: Task, config: MaskedConfig, first: int) -> Iterator[Batch]:
    """Yield the batches of all steps from step `first` on. Draws those before too, as the generators' state depends on them."""
    texts = config.batch or max(1, ROWS // rows_of(task, config.block))
    rng, generator = random.Random(config.seed), torch.Generator().manual_seed(config.seed + 1)
    for step in range(config.steps):
        batch = make_batch(task, config.block, texts, rng, generator, sources=config.encoder > 0)
        if step >= first:
            yield batch


def save(folder: Path, model: Model, task: Task, config: MaskedConfig) -> None:
    """Write a model folder: model.safetensors, tokenizer.json, and config.json last."""
    folder.mkdir(parents=True, exist_ok=True)
    end = task.id_of(END)
    more = {"torch_dtype": "float32", "mask_token_id": model.config.mask_id, "block": config.block, "eos_token_id": end}
    settings = (hf_config(model.config, None, end) if model.encoder is None else t5.to_hf(model.config)) | more
    save_file(stored_tensors(model, "safetensors"), folder / "model.safetensors", {"format": "pt"})
    task.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "mask_token": MASK}, indent=2) + "\n", "utf-8")
    write_json(folder / CONFIG, settings)


def write_prompts(path: Path, task: Task, count: int, seed: int) -> None:
    """Write fresh prompts as JSON lines, with their answers if these are known."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        ids, _answer = task.pair(rng, rng.choice(task.sizes))
        prompt = task.tokenizer.decode(ids)
        lines.append(json.dumps({"prompt": prompt, "answers": task.answers(prompt)}, ensure_ascii=False))
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


@exclusive
def train_masked(
    task: Task, config: MaskedConfig, out: Path, progress: Progress | None = None, interrupt: Interrupt | None = None
) -> float:
    """Train a model into the folder `out`, with prompts to try it on. Returns the seconds it took.

    The same call resumes a stopped training. Raises ValueError if `out` holds a model, and KeyboardInterrupt if stopped.
    """
    work = out / WORK
    if (out / CONFIG).exists() and not work.exists():
        raise ValueError(f"{out} holds a model; name another folder")
    begin = time.perf_counter()
    model = train(task, config, work, progress or Progress(), interrupt)
    save(out, model, task, config)
    write_prompts(out / "prompts.jsonl", task, 200, config.seed + 7)
    shutil.rmtree(work)
    return time.perf_counter() - begin
