"""From a model to trained heads in a folder: texts, training, and what they are worth on prompts that were held out."""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.runner.heads import EXIT, Heads
from headrace.startup import heads as files
from headrace.startup.exits import fingerprint
from headrace.startup.opening import Opened, open_model
from headrace.text.chat import TemplateError
from headrace.training.overlap import hashes
from headrace.training.run import alone_in, begin
from headrace.training.teacher import Teacher, read_teacher
from headrace.training.texts import SHARD, Shards, Text, context_of, open_writer, own_prompts, write_texts
from headrace.training.train import Training, agreement

HELD = 16  # of so many texts one is held out
JUDGED = 16  # held-out prompts that are answered again with the heads
ANSWER = 96  # tokens of these answers
Prompt = str | list[dict[str, Any]]
Tell = Callable[[str, float, float, str], None]  # what is done, how much of it, of how much, a remark


@dataclass(frozen=True, slots=True)
class Recipe:
    """How heads are trained. `prompts`: the caller's own, texts or conversations; without any the model writes them
    too. `count`: tokens drafted at once. `vocab`: tokens to choose from, the most frequent of the texts. `exits`: after how
    many layers they stand, where they are what is trained."""

    kind: str
    texts: int = 2048
    minutes: float = 45.0
    count: int = 3
    vocab: int = 8192
    max_tokens: int = 256
    rate: float = 1e-3
    batch: int = 8
    seed: int = 0
    threads: int | None = None
    prompts: Sequence[Prompt] = ()
    exits: tuple[int, ...] = ()

    @property
    def asked(self) -> list[Prompt]:
        """The caller's prompts in the order in which texts are written of them, as many as there are texts at most."""
        return random.Random(self.seed).sample(self.prompts, len(self.prompts))[: self.texts]

    @property
    def places(self) -> int:
        """How many heads, or exits, there are."""
        return len(self.exits) or self.count

    def about(self, opened: Opened) -> dict[str, Any]:
        """What must be the same where a training goes on: its texts have the rows of one model, after these layers."""
        asked = hashlib.sha256(json.dumps(list(self.prompts)).encode()).hexdigest()[:12] if self.prompts else "its own"
        model = f"{opened.path.name} {fingerprint(opened)[:12]}"
        return {"heads": self.kind, "tokens": self.places, "model": model, "exits": list(self.exits), "prompts": asked}


@dataclass(frozen=True, slots=True)
class Result:
    """`agreement`: how often the first 1, 2 … tokens of a draft are all the target's, on held-out texts; then what happened
    when held-out prompts were answered, greedily, with `count` tokens drafted in each step."""

    agreement: list[float]
    accepted: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained heads, the model they belong to, how they were trained, the hashes of the caller's prompts, and the texts they
    `learned` from and the others (`held`)."""

    heads: Heads
    opened: Opened
    teacher: Teacher
    about: dict[str, float | str]
    prompts: list[str]
    learned: list[Text]
    held: list[Text]


def distil(model: str, out: Path, recipe: Recipe, tell: Tell) -> Result:
    """Train heads for a model into `out`; what is there already of the same training is gone on with.

    Raises ValueError where the model cannot have heads, or `out` holds another training, or another one runs there.
    """
    with alone_in(out):
        return _distil(model, out, recipe, tell)


def _distil(model: str, out: Path, recipe: Recipe, tell: Tell) -> Result:
    made = train(open_model(model), out, recipe, tell)
    heads, held = made.heads, made.held
    with torch.autocast("cpu", torch.bfloat16):
        agreed = agreement(recipe.kind, heads.tensors, made.teacher, held, recipe.places)
    files.save(out, heads, made.opened, made.about, made.prompts)
    accepted, tokens = judge(made.opened, out, held[:JUDGED], recipe)
    result = Result(agreed, accepted, tokens)
    about = made.about | {"accepted": round(accepted, 3), "tokens_per_step": round(tokens, 2)}
    files.save(out, heads, made.opened, about, made.prompts)
    return result


def train(opened: Opened, out: Path, recipe: Recipe, tell: Tell) -> Trained:
    """Write the texts and learn from them. Raises ValueError as `distil` does."""
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    check_sources(opened, recipe)
    work = out / "work"
    begin(work, recipe.about(opened))
    _write(opened, Shards(work / "texts"), recipe, tell)
    texts = Shards(work / "texts").read()
    held, learned = texts[::HELD], [text for at, text in enumerate(texts) if at % HELD]
    vocab = frequent(learned, opened.config.vocab_size, recipe.vocab, opened.eos_ids, opened.config.never)
    teacher = read_teacher(opened, vocab)
    training = Training(recipe.kind, teacher, work, depth=recipe.places, minutes=recipe.minutes, rate=recipe.rate)
    training.run(
        learned, recipe.batch, seen=lambda spent, loss: tell("training", spent, recipe.minutes * 60, f"loss {loss:.3f}")
    )
    tensors = {**training.tensors, "vocab": vocab.to(torch.int32)}
    heads = Heads(recipe.kind, recipe.places, tensors, recipe.exits, recipe.exits[-1] if recipe.exits else 0)
    about: dict[str, float | str] = {"texts": len(texts), "minutes": training.state.spent / 60, "steps": training.state.steps}
    return Trained(heads, opened, teacher, about, hashes(recipe.asked), learned, held)


def _write(opened: Opened, shards: Shards, recipe: Recipe, tell: Tell) -> None:
    """Write the texts that are still missing."""
    numbers = range(-(-recipe.texts // SHARD))
    if all(shards.have(number) for number in numbers):
        return
    llm = open_writer(opened, recipe.threads)
    for number in numbers:
        tell("texts", number * SHARD, recipe.texts, "")
        if shards.have(number):
            continue
        size, seed = min(SHARD, recipe.texts - number * SHARD), recipe.seed + 100_003 * (number + 1)
        if recipe.prompts:
            asked = recipe.asked
            prompts = [asked_tokens(llm, asked[at % len(asked)]) for at in range(number * SHARD, number * SHARD + size)]
        else:
            prompts = own_prompts(llm, size, seed)
        shards.write(number, write_texts(llm, prompts, recipe.max_tokens, seed, recipe.exits))
    tell("texts", recipe.texts, recipe.texts, "")
    llm.close()


def asked_tokens(llm: LLM, prompt: Prompt) -> list[int]:
    """Through the chat template, where there is one."""
    try:
        return llm.render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    except TemplateError:
        if not isinstance(prompt, str):
            raise
        return llm.tokenizer.encode(prompt)


def check_sources(opened: Opened, recipe: Recipe) -> None:
    """Raise ValueError for what an encoder-decoder cannot learn: it drafts by exits alone, and writes from sources."""
    if opened.config.source is None:
        return
    if recipe.kind != EXIT:
        raise ValueError(f"heads of an encoder-decoder are exits, and {recipe.kind} was asked for; use --kind {EXIT}")
    if not recipe.prompts:
        raise ValueError(f"{opened.name} writes from sources, and cannot write these itself; name a file of them with --input")


def frequent(
    texts: Sequence[Text], vocab_size: int, count: int, always: frozenset[int], never: int | None = None
) -> torch.Tensor:
    """The `count` tokens that answers have most often, ascending; where they have fewer, the first of the vocabulary too. Those
    that must come are among them, and that which is `never` written is not."""
    seen = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        seen += torch.bincount(text.tokens[text.answer :], minlength=vocab_size)
    seen[torch.tensor(sorted(always), dtype=torch.int64)] = int(seen.max()) + 1
    if never is not None:
        seen[never] = -1
    return seen.argsort(descending=True, stable=True)[: min(count, vocab_size - (never is not None))].sort().values


def judge(opened: Opened, out: Path, held: Sequence[Text], recipe: Recipe, temperature: float = 0.0) -> tuple[float, float]:
    """Answer held-out prompts with the heads: accepted of drafted tokens, and tokens of an output for each step."""
    prompts = [text.prompt for text in held]
    how = SamplingParams(temperature=temperature, seed=recipe.seed, max_tokens=ANSWER)
    return acceptance(opened, out, "heads", prompts, recipe.count, how, recipe.threads)


def acceptance(
    opened: Opened,
    draft: Path,
    method: str,
    prompts: Sequence[list[int]],
    count: int,
    params: SamplingParams,
    threads: int | None = None,
) -> tuple[float, float]:
    """Answer prompts with a draft (method draft or heads) of `count` tokens in each step: accepted of drafted tokens, and
    tokens of an output for each step."""
    settings: dict[str, Any] = {"max_model_len": context_of(opened), "threads": threads}
    llm = LLM(opened.path, draft=draft, speculate=method, draft_tokens=count, **settings)
    limit = min(params.max_tokens or ANSWER, llm.memory_plan.max_model_len // 2)
    outputs = llm.generate(list(prompts), params.replace(max_tokens=limit))
    llm.close()
    metrics = [output.metrics for output in outputs]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafted = sum(one.drafted for one in metrics)
    return sum(one.accepted for one in metrics) / max(1, drafted), tokens / max(1, sum(one.steps for one in metrics))
