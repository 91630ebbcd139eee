"""Training a small model that fills in blocks of masked tokens, and that also writes token by token."""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headrace.backends.eager.play import play
from headrace.compress.export import CONFIG, hf_config, write_json
from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.models.base import Model
from headrace.models.families import t5
from headrace.models.layers.embedding import Relative
from headrace.models.registry import describe
from headrace.ops.attention import rotate
from headrace.ops.relative import buckets
from headrace.ops.weights import RelativeWeights
from headrace.runner.record import Segment, record, record_cross
from headrace.training.masked_batches import Batch, make_batch, rows_of
from headrace.training.masked_tasks import END, MASK, Task
from headrace.training.run import alone_in
from headrace.weights.loader import Allocator, stored_tensors

CONTEXT = 256
ROWS = 1536  # of a step: so 600 steps of the small sizes take less than a minute on two cores, whatever the texts' lengths
WARM_UP = 20  # steps
SPREAD = 0.05  # of weights to begin with
DECAY, CLIP = 0.01, 1.0

Tell = Callable[[int, int, str], None]  # steps done, of how many, and a remark


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, and for how many steps."""

    block: int = 8
    layers: int = 4
    encoder: int = 0  # layers of one that reads the prompt; 0: there is none, and the prompt is known tokens
    width: int = 96
    heads: int = 4
    steps: int = 600
    batch: int | None = None  # texts of a step; None: what makes some ROWS rows
    rate: float = 3e-3
    seed: int = 0
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """A model whose layers are carried out op by op, with gradients: `layers`; of an encoder-decoder those of its encoder too,
    and what its decoder stores of a source."""

    model: Model
    layers: tuple[Segment, ...]
    encoder: tuple[Segment, ...] = ()
    stores: tuple[Segment, ...] = ()

    @classmethod
    def of(cls, model: Model) -> "Played":
        layers = record(model, embeds=False).layers
        if model.encoder is None:
            return cls(model, layers)
        return cls(model, layers, record(model.encoder, embeds=False).layers, record_cross(model).layers)

    def logits(self, batch: Batch, rows: torch.Tensor) -> torch.Tensor:
        """Logits [r, vocabulary] of some rows of a batch."""
        if batch.source is not None:
            assert self.model.encoder is not None, "only an encoder-decoder has sources"
            memory = self._run(self.encoder, self.model.encoder.embed(batch.source), batch.source)
            self._run(self.stores, memory, batch)
        made: torch.Tensor = self.model.head(self._run(self.layers, self.model.embed(batch), batch)[rows])
        return made

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
    **more: Any,
) -> torch.Tensor:
    """The op of that name over whole texts, with gradients: for models of one head of K and V for each of Q, without windows,
    caps, sinks and norms of heads. Who sees whom the batch says, not `causal`."""
    if other := [name for name, value in more.items() if value is not None]:
        raise ValueError(f"a model with {', '.join(other)} is not trained here")

    def split(x: torch.Tensor, turned: bool) -> torch.Tensor:
        x = x.view(len(x), heads, -1)
        x = rotate(x, rope, ctx) if turned and rope is not None else x  # type: ignore[arg-type]  # it reads positions alone
        return x.view(ctx.texts, -1, heads, x.shape[-1]).transpose(1, 2)

    keys, values = ctx.read[layer] if source else (k, v)
    assert keys is not None
    assert values is not None
    seen = None if source else ctx.seen if bias is None else _biased(ctx, bias)
    mixed = scaled_dot_product_attention(split(q, True), split(keys, not source), split(values, False), seen, scale=scale)
    return mixed.transpose(1, 2).reshape(len(q), -1)


def _biased(ctx: Batch, bias: RelativeWeights) -> torch.Tensor:
    """What is added to the scores of a text's rows, [heads, rows, rows]: by distance, and so that only what is seen counts."""
    if bias not in ctx.memo:
        places = ctx.positions[: len(ctx.seen)]
        at = buckets(places[None, :] - places[:, None], len(bias.weight), bias.distance, bias.both)
        ctx.memo[bias] = bias.weight[at].permute(2, 0, 1).masked_fill(~ctx.seen, -math.inf)
    made: torch.Tensor = ctx.memo[bias]
    return made


def store(k: torch.Tensor, v: torch.Tensor, ctx: Batch, layer: int, **more: Any) -> torch.Tensor:
    """The op of that name: K and V of a source, for the rows of a layer that read it."""
    ctx.read[layer] = k, v
    return k


def new_model(task: Task, recipe: Recipe) -> Model:
    """A llama, or a T5 where there is to be an encoder, with random weights and the task's vocabulary."""
    model = describe(_encoder_decoder(task, recipe) if recipe.encoder else _decoder(task, recipe))
    generator = torch.Generator().manual_seed(recipe.seed)
    for _, holder in model.holders():
        holder.create(Allocator(torch.float32))
        for name in holder.params():
            weight = getattr(holder, name)
            spread = 1.0 if isinstance(holder, Relative) else SPREAD  # all that a T5 knows of positions
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=spread, generator=generator)
        holder.finish()
    return model


def _decoder(task: Task, recipe: Recipe) -> ModelConfig:
    layer = LayerConfig(recipe.heads, recipe.heads, recipe.width // recipe.heads, 2 * recipe.width, rope=RopeConfig())
    sizes = task.tokenizer.get_vocab_size(), recipe.width
    return ModelConfig("llama", *sizes, (layer,) * recipe.layers, CONTEXT, mask_id=task.id_of(MASK))


def _encoder_decoder(task: Task, recipe: Recipe) -> ModelConfig:
    layer = LayerConfig(recipe.heads, recipe.heads, recipe.width // recipe.heads, 2 * recipe.width)
    encoder = ModelConfig(
        "t5",
        task.tokenizer.get_vocab_size(),
        recipe.width,
        (layer,) * recipe.encoder,
        CONTEXT,
        tied_head=False,
        attn_scale=1.0,
        encoder=True,
        activation="gelu_tanh",
        gated=True,
        buckets=32,
        bucket_distance=128,
    )
    layers, ids = (layer,) * recipe.layers, {"start": task.id_of(END), "mask_id": task.id_of(MASK)}
    return replace(encoder, layers=layers, encoder=False, source=encoder, **ids)  # type: ignore[arg-type]


def train(task: Task, recipe: Recipe, tell: Tell) -> Model:
    """A trained model: the same for the same recipe on the same machine and threads."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.width % (2 * recipe.heads):
        raise ValueError(
            f"a width of {recipe.width} cannot be cut into {recipe.heads} heads of an even size; choose a multiple"
        )
    model = new_model(task, recipe)
    played, weights = Played.of(model), list(model.parameters())
    texts = recipe.batch or max(1, ROWS // rows_of(task, recipe.block))
    for weight in weights:
        weight.requires_grad_()
    learner = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=DECAY, betas=(0.9, 0.98))
    rng, generator = random.Random(recipe.seed), torch.Generator().manual_seed(recipe.seed + 1)
    for step in range(recipe.steps):
        for group in learner.param_groups:
            group["lr"] = recipe.rate * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / recipe.steps)) / 2
        batch = make_batch(task, recipe.block, texts, rng, generator, sources=recipe.encoder > 0)
        rows = (batch.wanted >= 0).nonzero()[:, 0]
        loss = cross_entropy(played.logits(batch, rows), batch.wanted[rows])
        learner.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        learner.step()
        tell(step + 1, recipe.steps, f"loss {loss.item():.3f}")
    for weight in weights:
        weight.requires_grad_(False)
    return model


def save(folder: Path, model: Model, task: Task, recipe: Recipe) -> None:
    """A folder as any model's: config.json, model.safetensors, tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    end = task.id_of(END)
    more = {"torch_dtype": "float32", "mask_token_id": model.config.mask_id, "block": recipe.block, "eos_token_id": end}
    numbers = (hf_config(model.config, None, end) if model.encoder is None else t5.to_hf(model.config)) | more
    save_file(stored_tensors(model, "safetensors"), folder / "model.safetensors", {"format": "pt"})
    task.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "mask_token": MASK}, indent=2) + "\n", "utf-8")
    write_json(folder / CONFIG, numbers)


def write_prompts(path: Path, task: Task, count: int, seed: int) -> None:
    """Fresh prompts as JSON lines, with their answers where these are known."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        ids, _answer = task.pair(rng, rng.choice(task.sizes))
        prompt = task.tokenizer.decode(ids)
        lines.append(json.dumps({"prompt": prompt, "answers": task.answers(prompt)}, ensure_ascii=False))
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def make(task: Task, recipe: Recipe, out: Path, tell: Tell) -> float:
    """Train a model into a folder, with prompts to try it on; the seconds it took. Raises ValueError where it holds one."""
    with alone_in(out):
        if (out / CONFIG).exists():
            raise ValueError(f"{out} holds a model; name another folder")
        began = time.perf_counter()
        model = train(task, recipe, tell)
        save(out, model, task, recipe)
        write_prompts(out / "prompts.jsonl", task, 200, recipe.seed + 7)
        return time.perf_counter() - began
