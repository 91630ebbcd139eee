"""Training of draft heads: the model writes texts, the heads learn from them, and both are measured on held-out prompts.

The loss is the cross-entropy to the target's distribution, over the part of the vocabulary that the heads choose from, at every
token of the target's answers, for every drafted position.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import log_softmax

from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.runner.heads import EXIT, Heads, Tensors
from headrace.startup import heads as files
from headrace.startup.classifier import fingerprint
from headrace.startup.opening import Opened, open_model
from headrace.text.chat import TemplateError
from headrace.training.head_kinds import KINDS, initial_tensors
from headrace.training.overlap import hashes
from headrace.training.run import Budget, Interrupt, Run, TrainingConfig, exclusive, record_job
from headrace.training.teacher import Batch, Teacher, norm, read_teacher
from headrace.training.texts import SHARD, Shards, Text, context_of, open_writer, own_prompts, write_texts

# One of HELD_OUT texts is held out.
HELD_OUT = 16
# Held-out prompts that are answered with the trained heads, and the most tokens of each answer.
JUDGED_PROMPTS = 16
ANSWER_TOKENS = 96
# Weight in the loss of a drafted position, as a share of the weight of the position before.
POSITION_DECAY = 0.8
Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class HeadsConfig(TrainingConfig):
    """Settings of a training of heads.

    kind: "heads", "feature" or "exit". texts: number of answers to learn from. minutes: of the training, without the texts.
    count: tokens drafted at once. vocab: size of the vocabulary to draft from, the most frequent tokens of the texts.
    max_tokens: of an answer. prompts: texts or conversations; if empty, the model writes prompts too.
    exits: numbers of layers after which exit heads stand, for kind "exit".
    """

    kind: str
    texts: int = 2048
    minutes: float = 45.0
    count: int = 3
    vocab: int = 8192
    max_tokens: int = 256
    rate: float = 1e-3
    batch: int = 8
    prompts: Sequence[Prompt] = ()
    exits: tuple[int, ...] = ()

    @property
    def selected_prompts(self) -> list[Prompt]:
        """The caller's prompts in the order in which they are answered, `texts` at most."""
        return random.Random(self.seed).sample(self.prompts, len(self.prompts))[: self.texts]

    @property
    def depth(self) -> int:
        """Number of exit heads, or of tokens that heads draft at once."""
        return len(self.exits) or self.count

    def job(self, opened: Opened) -> dict[str, Any]:
        """Settings that must stay the same on resume: the stored texts hold rows of this model after these layers."""
        prompts = hashlib.sha256(json.dumps(list(self.prompts)).encode()).hexdigest()[:12] if self.prompts else "its own"
        model = f"{opened.path.name} {fingerprint(opened)[:12]}"
        return {"heads": self.kind, "tokens": self.depth, "model": model, "exits": list(self.exits), "prompts": prompts}


@dataclass(frozen=True, slots=True)
class HeadsReport:
    """Quality of trained heads on held-out texts.

    agreement: by draft length 1, 2, …, the share of drafts whose tokens are all the target's likeliest.
    accepted, tokens_per_step: accepted share of drafted tokens, and tokens per step, in greedy answers.
    """

    agreement: list[float]
    accepted: float
    tokens_per_step: float


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Trained heads with their target, the hashes of the caller's prompts, and the texts of training and hold-out.

    about: what heads.json records of the training, for people.
    """

    heads: Heads
    opened: Opened
    teacher: Teacher
    about: dict[str, float | str]
    prompts: list[str]
    learned: list[Text]
    held: list[Text]


@exclusive
def train_heads(
    model: str, out: Path, config: HeadsConfig, progress: Progress | None = None, interrupt: Interrupt | None = None
) -> HeadsReport:
    """Train heads for a model into the folder `out`. The same call resumes a stopped training.

    Raises ValueError if the model cannot have such heads, or `out` belongs to another training or process.
    """
    trained = learn(open_model(model), out, config, progress or Progress(), interrupt)
    heads, held = trained.heads, trained.held
    with torch.autocast("cpu", torch.bfloat16):
        agreed = agreement(config.kind, heads.tensors, trained.teacher, held, config.depth)
    files.save(out, heads, trained.opened, trained.about, trained.prompts)
    accepted, tokens = judge(trained.opened, out, held[:JUDGED_PROMPTS], config)
    about = trained.about | {"accepted": round(accepted, 3), "tokens_per_step": round(tokens, 2)}
    files.save(out, heads, trained.opened, about, trained.prompts)
    return HeadsReport(agreed, accepted, tokens)


def learn(
    opened: Opened, out: Path, config: HeadsConfig, progress: Progress, interrupt: Interrupt | None = None
) -> TrainedHeads:
    """Write the texts and train on them, without locking or saving. Raises ValueError as `train_heads` does."""
    config.set_threads()
    check_sources(opened, config)
    work = out / "work"
    record_job(work, config.job(opened))
    _write_missing(opened, Shards(work / "texts"), config, progress)
    texts = Shards(work / "texts").read()
    held, learned = texts[::HELD_OUT], [text for number, text in enumerate(texts) if number % HELD_OUT]
    vocab = answer_vocabulary(learned, opened.config.vocab_size, config.vocab, opened.eos_ids, opened.config.never)
    teacher = read_teacher(opened, vocab)
    tensors = {name: tensor.float() for name, tensor in initial_tensors(config.kind, teacher, config.depth).items()}
    run = Run(tensors, work, Budget(minutes=config.minutes), config.rate)
    _train(run, teacher, learned, config, progress, interrupt)
    last = config.exits[-1] if config.exits else 0
    heads = Heads(config.kind, config.depth, {**tensors, "vocab": vocab.to(torch.int32)}, config.exits, last)
    about: dict[str, float | str] = {"texts": len(texts), "minutes": run.seconds / 60, "steps": run.steps}
    return TrainedHeads(heads, opened, teacher, about, hashes(config.selected_prompts), learned, held)


def _train(
    run: Run, teacher: Teacher, texts: Sequence[Text], config: HeadsConfig, progress: Progress, interrupt: Interrupt | None
) -> None:
    if not run.steps:
        KINDS[config.kind].fit(run.tensors, teacher, texts)
    batches = _batches(run, texts, config.batch)
    smoothed = math.nan

    def step(number: int) -> float:
        nonlocal smoothed
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(config.kind, run.tensors, teacher, next(batches), config.depth)
        loss.backward()
        smoothed = loss.item() if math.isnan(smoothed) else 0.95 * smoothed + 0.05 * loss.item()
        return loss.item()

    run.train(step, progress, interrupt, remark=lambda loss: f"loss {smoothed:.3f}")


def _batches(run: Run, texts: Sequence[Text], size: int) -> Iterator[Batch]:
    """Yield batches of texts of similar length, epoch after epoch, each epoch in another order."""
    while True:
        random = torch.Generator().manual_seed(run.steps)
        jitter = torch.rand(len(texts), generator=random) * 40
        order = sorted(range(len(texts)), key=lambda index: len(texts[index].tokens) + float(jitter[index]))
        groups = [order[start : start + size] for start in range(0, len(order), size)]
        for group in torch.randperm(len(groups), generator=random).tolist():
            yield Batch.of([texts[index] for index in groups[group]])


def loss_of(kind: str, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> torch.Tensor:
    """Weighted mean over drafted positions of the mean cross-entropy of their rows, in nats."""
    with torch.no_grad():
        index = torch.zeros(batch.rows.shape, dtype=torch.int64)
        index[batch.rows] = torch.arange(int(batch.rows.sum()))
        last = teacher.last(batch.hidden)
        truth = teacher.probabilities(last[batch.rows])
    total, weights = torch.zeros(()), 0.0
    for position, (predicted, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
        logits = teacher.logits(norm(predicted[rows], tensors["norm.weight"], teacher.config.norm_eps))
        loss = -(truth[index[rows]] * log_softmax(logits, -1)).sum(-1).mean()
        loss = loss + KINDS[kind].extra(predicted[rows], last[rows])
        weight = POSITION_DECAY**position if KINDS[kind].chained else 1.0
        total, weights = total + weight * loss, weights + weight
    return total / weights


@torch.inference_mode()
def agreement(kind: str, tensors: Tensors, teacher: Teacher, texts: Sequence[Text], depth: int, size: int = 8) -> list[float]:
    """By drafted position, the share of drafts that are the target's likeliest tokens up to it; by exit, the exit's share."""
    right, total = [0] * depth, [0] * depth
    for start in range(0, len(texts), size):
        batch = Batch.of(texts[start : start + size])
        best = teacher.probabilities(teacher.last(batch.hidden).flatten(0, 1)).argmax(-1).view(batch.rows.shape)
        chain, chained = torch.ones_like(batch.rows), KINDS[kind].chained
        for position, (predicted, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
            logits = teacher.logits(norm(predicted.flatten(0, 1), tensors["norm.weight"], teacher.config.norm_eps))
            same = logits.argmax(-1).view(batch.rows.shape) == best
            if position == 0 or not chained:
                chain = same
            else:
                chain = torch.cat((torch.zeros_like(chain[:, :1]), chain[:, :-1]), 1) & same
            right[position] += int((chain & rows).sum())
            total[position] += int(rows.sum())
    return [count / max(1, of) for count, of in zip(right, total, strict=True)]


def _write_missing(opened: Opened, shards: Shards, config: HeadsConfig, progress: Progress) -> None:
    """Have the model write the texts that are not stored yet."""
    numbers = range(-(-config.texts // SHARD))
    if all(shards.have(number) for number in numbers):
        return
    llm = open_writer(opened, config.threads)
    progress.start("texts", config.texts, unit="texts")
    for number in numbers:
        size, seed = min(SHARD, config.texts - number * SHARD), config.seed + 100_003 * (number + 1)
        if not shards.have(number):
            if config.prompts:
                selected = config.selected_prompts
                first = number * SHARD
                prompts = [prompt_tokens(llm, selected[index % len(selected)]) for index in range(first, first + size)]
            else:
                prompts = own_prompts(llm, size, seed)
            shards.write(number, write_texts(llm, prompts, config.max_tokens, seed, config.exits))
        progress.advance(size)
    llm.close()


def prompt_tokens(llm: LLM, prompt: Prompt) -> list[int]:
    """Return the token ids of a prompt, through the chat template if the model has one."""
    try:
        return llm.render([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
    except TemplateError:
        if not isinstance(prompt, str):
            raise
        return llm.tokenizer.encode(prompt)


def check_sources(opened: Opened, config: HeadsConfig) -> None:
    """Raise ValueError for an encoder-decoder if the heads are no exits, or there are no prompts as its sources."""
    if opened.config.source is None:
        return
    if config.kind != EXIT:
        raise ValueError(f"an encoder-decoder can have exits only, not {config.kind}; use --kind {EXIT}")
    if not config.prompts:
        raise ValueError(
            f"{opened.name} is an encoder-decoder and cannot generate its own sources; name a file of them with --input"
        )


def answer_vocabulary(
    texts: Sequence[Text], vocab_size: int, count: int, always: frozenset[int], never: int | None = None
) -> torch.Tensor:
    """Return the ids [count] int64, ascending, of the tokens that are most frequent in the answers; ties go to the lower id.

    always: ids that are included in any case. never: an id that is left out.
    """
    frequency = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        frequency += torch.bincount(text.tokens[text.answer :], minlength=vocab_size)
    frequency[torch.tensor(sorted(always), dtype=torch.int64)] = int(frequency.max()) + 1
    if never is not None:
        frequency[never] = -1
    return frequency.argsort(descending=True, stable=True)[: min(count, vocab_size - (never is not None))].sort().values


def judge(
    opened: Opened, out: Path, held: Sequence[Text], config: HeadsConfig, temperature: float = 0.0
) -> tuple[float, float]:
    """Answer held-out prompts with the heads in `out`. Returns the accepted share of drafted tokens, and tokens per step."""
    prompts = [text.prompt for text in held]
    params = SamplingParams(temperature=temperature, seed=config.seed, max_tokens=ANSWER_TOKENS)
    return acceptance(opened, out, "heads", prompts, config.count, params, config.threads)


def acceptance(
    opened: Opened,
    draft: Path,
    method: str,
    prompts: Sequence[list[int]],
    count: int,
    params: SamplingParams,
    threads: int | None = None,
) -> tuple[float, float]:
    """Answer prompts with `count` tokens drafted in each step.

    draft: the folder of a draft model (method "draft") or of heads (method "heads").
    Returns the accepted share of drafted tokens, and tokens per step of an output.
    """
    settings: dict[str, Any] = {"max_model_len": context_of(opened), "threads": threads}
    llm = LLM(opened.path, draft=draft, speculate=method, draft_tokens=count, **settings)
    limit = min(params.max_tokens or ANSWER_TOKENS, llm.memory_plan.max_model_len // 2)
    outputs = llm.generate(list(prompts), params.replace(max_tokens=limit))
    llm.close()
    metrics = [output.metrics for output in outputs]
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafted = sum(metric.drafted for metric in metrics)
    accepted = sum(metric.accepted for metric in metrics)
    return accepted / max(1, drafted), tokens / max(1, sum(metric.steps for metric in metrics))
