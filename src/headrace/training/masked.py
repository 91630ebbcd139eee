"""Training a small model that fills in blocks of masked tokens, and that also writes token by token."""

import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headrace.compress.export import CONFIG, hf_config, write_json
from headrace.data.config import LayerConfig, ModelConfig, RopeConfig
from headrace.eager.play import play
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.ops.attention import rotate
from headrace.runner.record import Segment, record
from headrace.training.masked_texts import Batch, make_batch
from headrace.training.tasks import END, MASK, Task
from headrace.weights.loader import Allocator, stored_tensors

CONTEXT = 256
WARM_UP = 20  # steps
SPREAD = 0.05  # of weights to begin with
DECAY, CLIP = 0.01, 1.0

Tell = Callable[[int, int, str], None]  # steps done, of how many, and a remark


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is trained, and for how many steps."""

    block: int = 8
    layers: int = 4
    width: int = 96
    heads: int = 4
    steps: int = 600
    batch: int = 64
    rate: float = 3e-3
    seed: int = 0
    threads: int | None = None


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    ctx: Batch,
    layer: int,
    rope: Any = None,
    causal: bool = True,
    **more: Any,
) -> torch.Tensor:
    """The op of that name over whole texts, with gradients: for models of one head of K and V for each of Q, without windows,
    caps, sinks and norms of heads."""
    if other := [name for name, value in more.items() if value is not None and value is not False]:
        raise ValueError(f"a model with {', '.join(other)} is not trained here")
    dim = 2 * len(rope.inv_freq)
    rows = len(q) // ctx.texts

    def heads(x: torch.Tensor, turned: bool) -> torch.Tensor:
        x = x.view(len(x), -1, dim)
        x = rotate(x, rope, ctx) if turned else x  # type: ignore[arg-type]  # of the step it reads positions alone
        return x.view(ctx.texts, rows, -1, dim).transpose(1, 2)

    mixed = scaled_dot_product_attention(heads(q, True), heads(k, True), heads(v, False), attn_mask=ctx.seen)
    return mixed.transpose(1, 2).reshape(len(q), -1)


def new_model(task: Task, recipe: Recipe) -> Model:
    """A llama with random weights that has the task's vocabulary."""
    head_dim = recipe.width // recipe.heads
    layer = LayerConfig(recipe.heads, recipe.heads, head_dim, 2 * recipe.width, rope=RopeConfig())
    sizes = task.tokenizer.get_vocab_size(), recipe.width
    model = describe(ModelConfig("llama", *sizes, (layer,) * recipe.layers, CONTEXT, mask_id=task.id_of(MASK)))
    generator = torch.Generator().manual_seed(recipe.seed)
    for _, holder in model.holders():
        holder.create(Allocator(torch.float32))
        for name in holder.params():
            weight = getattr(holder, name)
            weight.fill_(1.0) if weight.dim() == 1 else weight.normal_(std=SPREAD, generator=generator)
        holder.finish()
    return model


def logits(model: Model, layers: tuple[Segment, ...], batch: Batch, rows: torch.Tensor) -> torch.Tensor:
    """Logits [r, vocabulary] of some rows of a batch, with gradients."""
    x = model.embed(batch)
    for segment in layers:
        ctx: Any = batch
        x = play(segment, [0] * len(segment.nodes), 0, x, ctx, {"attention": attention})
    made: torch.Tensor = model.head(x[rows])
    return made


def train(task: Task, recipe: Recipe, tell: Tell) -> Model:
    """A trained model: the same for the same recipe on the same machine and threads."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    if recipe.width % (2 * recipe.heads):
        raise ValueError(
            f"a width of {recipe.width} cannot be cut into {recipe.heads} heads of an even size; choose a multiple"
        )
    model = new_model(task, recipe)
    layers = record(model, embeds=False).layers
    weights = list(model.parameters())
    for weight in weights:
        weight.requires_grad_()
    learner = torch.optim.AdamW(weights, lr=recipe.rate, weight_decay=DECAY, betas=(0.9, 0.98))
    rng, generator = random.Random(recipe.seed), torch.Generator().manual_seed(recipe.seed + 1)
    for step in range(recipe.steps):
        for group in learner.param_groups:
            group["lr"] = recipe.rate * min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / recipe.steps)) / 2
        batch = make_batch(task, recipe.block, recipe.batch, rng, generator)
        rows = (batch.wanted >= 0).nonzero()[:, 0]
        loss = cross_entropy(logits(model, layers, batch, rows), batch.wanted[rows])
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
    more = {"torch_dtype": "float32", "mask_token_id": model.config.mask_id, "block": recipe.block}
    numbers = hf_config(model.config, None, end) | more
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
    """Train a model into a folder, with prompts to try it on; the seconds it took."""
    began = time.perf_counter()
    model = train(task, recipe, tell)
    save(out, model, task, recipe)
    write_prompts(out / "prompts.jsonl", task, 200, recipe.seed + 7)
    return time.perf_counter() - began
