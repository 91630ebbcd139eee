"""Distillation: a student learns from a teacher. Healing is the same for a model that was pruned or rounded.

`Healing` is the same training within `compress`: a pruned or rounded model learns from the original.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.compress.export import CONFIG, settings_of, write_json, write_words
from headrace.compress.healing import BATCH, HealReport
from headrace.compress.judge import Judgement
from headrace.compress.pipeline import SELF, Heal
from headrace.compress.texts import WINDOW, Texts, draw_texts
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_model
from headrace.training.distil_encoder import EncoderReport, distil_encoder
from headrace.training.examples import (
    Item,
    answered,
    batch_of,
    held_apart,
    read_items,
    reasoned,
    windows,
    write_items,
)
from headrace.training.exit_heads import check as check_exits
from headrace.training.gradual import GradualPruning
from headrace.training.heads import ANSWER_TOKENS, Prompt, acceptance, prompt_tokens
from headrace.training.losses import HARD, LOSSES, MAPS, DistillationLoss, check_maps
from headrace.training.run import Budget, Interrupt, Run, TrainingConfig, exclusive, record_job
from headrace.training.students import Student, ends, student_of
from headrace.training.teacher_forward import AUTO, backend_of, forward_of
from headrace.training.texts import CONTEXT, context_of, open_writer, own_prompts
from headrace.weights.atomic_file import atomic_write
from headrace.weights.loader import load_model, stored_tensors

# Texts held out to judge by.
HELD_OUT = 16
REPORT = "distil.json"
# Default learning rates, of a student with learned weights and of one with random weights.
RATE, RANDOM_RATE = 1e-4, 1e-3
# Token count above that of any text file.
UNLIMITED = 1 << 40
HEALING_LOSSES = ("kl", "ce")


@dataclass(frozen=True, slots=True)
class DistilConfig(TrainingConfig):
    """Settings of a distillation.

    student: which student, see `students.FORMS`. losses: names of `losses.LOSSES`.
    texts: a text file, or "self" if the teacher writes `count` texts; for the loss "sequence" a file of prompts, for "steps" a
    file of JSON lines. prompts: read from that file. window: most tokens of a text. batch: texts of a step.
    temperature: of the loss "kl". share: its weight λ next to a loss of tokens. reasons: weight λ of rationales.
    exits: layers of the student after which the loss "exits" is taken. rate: highest learning rate, None for the default.
    as_draft: also measure the student as a draft model. backend: one of `teacher_forward.BACKENDS`, where the teacher runs.
    Raises ValueError for settings that exclude each other or are out of range.
    """

    student: str
    budget: Budget
    losses: tuple[str, ...] = ("kl",)
    texts: str = SELF
    prompts: Sequence[Prompt] = ()
    count: int = 256
    window: int = 256
    batch: int = 4
    temperature: float = 2.0
    share: float = 0.5
    reasons: float = 1.0
    exits: tuple[int, ...] = ()
    rate: float | None = None
    as_draft: bool = False
    backend: str = AUTO

    def __post_init__(self) -> None:
        unknown = [name for name in self.losses if name not in LOSSES]
        if unknown or not self.losses or len(set(self.losses)) < len(self.losses):
            raise ValueError(f"losses are some of {', '.join(LOSSES)}, each once, not {','.join(self.losses)!r}")
        if len(own := HARD.intersection(self.losses)) > 1:
            raise ValueError(f"{', '.join(sorted(own))} learn from different texts; choose one of them")
        if "steps" in self.losses and self.texts == SELF:
            raise ValueError("the loss steps reads a file of prompts, rationales and answers; name it with texts")
        if ("exits" in self.losses) != bool(self.exits):
            raise ValueError("the loss exits needs the layers of the exits; give both or neither")
        if not 0 <= self.share <= 1 or self.temperature <= 0 or self.reasons < 0 or not 8 <= self.window <= CONTEXT:
            raise ValueError(f"share is 0 to 1, temperature above 0, reasons 0 or more, a window 8 to {CONTEXT} tokens")

    def job(self, opened: Opened, backend: str) -> dict[str, Any]:
        """Settings that must stay the same on resume: all but the budget and the threads. opened: the teacher."""
        values = asdict(self)
        for name in ("budget", "prompts", "threads", "as_draft", "seed", "backend"):
            values.pop(name)
        # Trainings from before the loss "exits" have no such entry in their record.
        if not self.exits:
            values.pop("exits")
        data = json.dumps(list(self.prompts)).encode() if self.texts == SELF else Path(self.texts).read_bytes()
        values["texts"] = f"{self.texts} {hashlib.sha256(data).hexdigest()[:16]}"
        return {"teacher": str(opened.path), **values, "seed": self.seed, "backend": backend}


@dataclass(frozen=True, slots=True)
class DraftReport:
    """The student as a draft model of its teacher, one token a step.

    before, after: accepted share of drafted tokens before and after the training. cost: weights that a token of the student
    reads over those of the teacher, which is the ratio of times if both are stored alike.
    """

    before: float
    after: float
    cost: float

    @property
    def speed(self) -> float:
        """Speed-up (1 + α) / (1 + c), if a verification costs as much as a plain step."""
        return (1 + self.after) / (1 + self.cost)


@dataclass(frozen=True, slots=True)
class DistilReport:
    """Result of a distillation, also written to distil.json.

    tokens: trained on in `steps` steps, `different` of them different. backend: of the teacher. weights: number of weights of
    the student and of the teacher. before, after: judgements on held-out texts. losses: of the steps of this call.
    """

    steps: int
    tokens: int
    different: int
    seconds: float
    backend: str
    weights: tuple[int, int]
    before: Judgement
    after: Judgement
    drafting: DraftReport | None = None
    losses: list[float] = field(default_factory=list)


@exclusive
def distil(
    teacher: str | Path,
    out: Path,
    config: DistilConfig,
    progress: Progress | None = None,
    interrupt: Interrupt | None = None,
) -> DistilReport | EncoderReport:
    """Train a student into the model folder `out`. The same call resumes a stopped training.

    Raises ValueError (WeightError, TokenizerError) for an invalid job before any training, KeyboardInterrupt if
    `interrupt` stopped the training, and OSError.
    """
    progress = progress or Progress()
    work = out / "work"
    threads = config.threads or torch.get_num_threads()
    if (out / CONFIG).exists() and not work.exists():
        raise ValueError(f"{out} holds a model; name another folder")
    opened = open_model(teacher)
    if opened.config.encoder:
        return distil_encoder(opened, out, config, config.job(opened, "torch"), progress, interrupt)
    if opened.config.source is not None:
        raise ValueError(f"{opened.name} is an encoder-decoder; a teacher is a decoder or an encoder alone")
    backend = backend_of(config.backend, opened, MAPS in config.losses)
    job = config.job(opened, backend)
    progress.start(f"loading {opened.path.name}")
    student = student_of(config.student, opened, config.seed)
    # Raises now for a student that could not be written after the training.
    settings_of(student.opened, student.model.config)
    if config.exits:
        check_exits(config.exits, student.model.config)
    if MAPS in config.losses:
        check_maps(opened.config, student.model.config)
    record_job(work, job)
    window = min(config.window, opened.config.max_position, student.model.config.max_position)
    learned, held = held_apart(_items(opened, work, config, window, progress), HELD_OUT, config.seed)
    progress.start("judging")
    forward = forward_of(backend, opened, window, config.threads, MAPS in config.losses)
    loss = DistillationLoss(forward, student, config.losses, config.temperature, config.share, config.exits)
    before, accepted = judge_untrained(loss, opened, work, held, config)
    # A native program sets torch to one thread.
    torch.set_num_threads(threads)
    run = Run(loss.tensors, work, config.budget, config.rate or (RANDOM_RATE if student.fresh else RATE))
    losses = train(run, loss, learned, config, progress, interrupt)
    progress.start("judging")
    save(out, student)
    drafting, large = None, describe(opened.config)
    if accepted is not None:
        cost = weights_per_token(student.model) / weights_per_token(large)
        drafting = DraftReport(accepted, _acceptance(opened, out, held, config), cost)
    tokens, different = tokens_seen(learned, run.steps, config)
    weights = student.model.num_parameters, large.num_parameters
    after = loss.judge(held)
    report = DistilReport(run.steps, tokens, different, run.seconds, backend, weights, before, after, drafting, losses)
    progress.finish()
    write_json(out / REPORT, {**job, **asdict(report), "losses": losses[-1:]})
    return report


def tokens_seen(learned: Sequence[Item], steps: int, config: DistilConfig) -> tuple[int, int]:
    """Return the tokens of the first `steps` steps, and how many of them are different."""
    tokens = sum(_length(item) for step in range(steps) for item in batch_of(learned, step, config.batch, config.seed))
    return tokens, min(tokens, sum(map(_length, learned)))


def _length(item: Item) -> int:
    return sum(len(example.tokens) for example in item)


def weights_per_token(model: Model) -> int:
    """Number of weights that a token reads. The embedding table counts only if it is the head too."""
    config = model.config
    return model.num_parameters - (0 if config.tied_head else config.vocab_size * config.hidden_size)


def _items(opened: Opened, work: Path, config: DistilConfig, window: int, progress: Progress) -> list[Item]:
    """Return the training items of at most `window` tokens; made once and stored in `work`."""
    path = work / "examples.json"
    if path.is_file():
        return read_items(path)
    if "steps" in config.losses:
        items = reasoned(Path(config.texts), opened.tokenizer, opened.tokenizer.eos_id, config.reasons, window)
    elif "sequence" in config.losses:
        items = _answers(opened, config, window, progress)
    else:
        tokens = config.count * window if config.texts == SELF else UNLIMITED
        items = windows(draw_texts(opened, config.texts, tokens, config.seed, progress, window, config.threads or 0))
    with atomic_write(path) as part:
        write_items(part, items)
    return items


def _answers(opened: Opened, config: DistilConfig, window: int, progress: Progress) -> list[Item]:
    """Have the teacher answer the caller's prompts, or its own."""
    with open_writer(opened, config.threads) as llm:
        if config.prompts:
            prompts = [prompt_tokens(llm, prompt) for prompt in config.prompts]
        else:
            prompts = own_prompts(llm, config.count, config.seed)
        prompts = [prompt for prompt in prompts if len(prompt) <= window // 2]
        if not prompts:
            raise ValueError(f"no prompt is short enough: half of a window is {window // 2} tokens; use a longer window")
        progress.start("answers of the teacher", len(prompts), unit="prompts")
        return answered(llm, prompts, window // 2, progress.advance)


def judge_untrained(
    loss: DistillationLoss, opened: Opened, work: Path, held: Sequence[Item], config: DistilConfig
) -> tuple[Judgement, float | None]:
    """Judge the untrained student, and with `as_draft` measure its acceptance; both are stored in `work`."""
    path = work / "before.json"
    stored = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    judgement = Judgement(**stored["judgement"]) if stored else loss.judge(held)
    accepted = stored.get("accepted")
    if config.as_draft and accepted is None:
        if (work / "checkpoint.safetensors").exists():
            raise ValueError(f"{work} was begun without as_draft, and what it accepted then is not known; begin again with it")
        untrained = work / "untrained"
        save(untrained, loss.student)
        accepted = _acceptance(opened, untrained, held, config)
        shutil.rmtree(untrained)
    write_json(path, {"judgement": asdict(judgement), "accepted": accepted})
    return judgement, accepted if config.as_draft else None


def _acceptance(opened: Opened, folder: Path, held: Sequence[Item], config: DistilConfig) -> float:
    """Accepted share of the tokens that a model folder drafts for the teacher, one at a time, on held-out texts."""
    room = context_of(opened) // 2
    prompts = [item[0].given[-room:] for item in held]
    params = SamplingParams(temperature=0.0, max_tokens=min(room, ANSWER_TOKENS), ignore_eos=True)
    return acceptance(opened, folder, "draft", prompts, 1, params, config.threads)[0]


def train(
    run: Run,
    loss: DistillationLoss,
    learned: Sequence[Item],
    config: DistilConfig,
    progress: Progress,
    interrupt: Interrupt | None,
    pruning: GradualPruning | None = None,
) -> list[float]:
    """Train to the end of the budget, with rounds of `pruning` if given. Returns the losses of the steps."""
    losses: list[float] = []

    def remark(value: float) -> str:
        losses.append(value)
        return f"step {run.steps}, loss {value:.3f}"

    def step(number: int) -> float:
        if pruning is not None:
            pruning.before_step(number)
        value = loss.backward(batch_of(learned, number, config.batch, config.seed))
        if pruning is not None:
            pruning.before_update()
        return value

    after_update = None if pruning is None else pruning.after_update
    run.train(step, progress, interrupt, remark=remark, after_update=after_update)
    return losses


def save(folder: Path, student: Student) -> None:
    """Write a student as a model folder: matrices in bfloat16, vectors in float32. config.json is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16 if tensor.dim() > 1 else torch.float32).contiguous()
        for name, tensor in stored_tensors(student.model, "safetensors").items()
    }
    with atomic_write(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    write_words(student.opened, folder)
    write_json(folder / CONFIG, settings_of(student.opened, student.model.config))


class Healing:
    """Implements `Healer` of compress.healing. backend: where the original runs, one of `teacher_forward.BACKENDS`."""

    def __init__(self, interrupt: Interrupt | None = None, backend: str = AUTO) -> None:
        self._interrupt, self._backend = interrupt, backend

    def heal(
        self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, progress: Progress
    ) -> tuple[Model, HealReport]:
        """Train on all texts but those held out to judge by. Restores torch's thread count.

        The same bytes for the same request on the same machine and threads, whether it was stopped or not.
        """
        backend = backend_of(self._backend, original, maps=False)
        record_job(folder, {"backend": backend})
        threads = torch.get_num_threads()
        torch.set_num_threads(how.threads)
        try:
            return self._heal(original, cut, texts, how, folder, progress, backend)
        finally:
            torch.set_num_threads(threads)

    def _heal(
        self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, progress: Progress, backend: str
    ) -> tuple[Model, HealReport]:
        model = load_model(cut.source)
        student = Student(model, cut, ends(model.config.num_layers, original.config.num_layers))
        config = DistilConfig(
            "", Budget(steps=how.steps), HEALING_LOSSES, batch=BATCH, rate=how.rate, seed=how.seed, threads=how.threads
        )
        teacher = forward_of(backend, original, min(WINDOW, original.config.max_position), how.threads, maps=False)
        loss = DistillationLoss(teacher, student, HEALING_LOSSES, config.temperature, config.share)
        learned, held = held_apart(windows(texts), HELD_OUT, how.seed)
        pruning = None if how.pruning is None else GradualPruning(model, how.pruning, how.steps)
        progress.start("judging")
        with nullcontext() if pruning is None else pruning.pruned_at_once():
            before, _ = judge_untrained(loss, original, folder, held, config)
        run = Run(loss.tensors, folder, config.budget, how.rate)
        train(run, loss, learned, config, progress, self._interrupt, pruning)
        progress.start("judging")
        after = loss.judge(held)
        progress.finish()
        return model, HealReport(run.steps, *tokens_seen(learned, run.steps, config), before, after)
