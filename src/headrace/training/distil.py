"""Distillation: a smaller model learns from a larger one, and one that was cut or rounded from what it was before (healing)."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.compress.export import CONFIG, settings_of, write_json, write_words
from headrace.compress.judge import Judgement
from headrace.compress.pipeline import SELF
from headrace.compress.texts import draw_texts
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress, Silent
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_model
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
from headrace.training.heads import ANSWER, Prompt, acceptance, asked_tokens
from headrace.training.losses import HARD, LOSSES, MAPS, Lesson, check_maps
from headrace.training.run import Budget, Run, alone_in, begin
from headrace.training.students import Student, student_of
from headrace.training.teacher_forward import AUTO, backend_of, forward_of
from headrace.training.texts import CONTEXT, context_of, open_writer, own_prompts
from headrace.weights.atomic_file import atomic_write
from headrace.weights.loader import stored_tensors

HELD = 16  # texts to judge by
SHOWN = "distil.json"
RATE, FRESH_RATE = 1e-4, 1e-3  # of learned weights, of random ones
ALL = 1 << 40  # tokens: more than a file has
Stopped = AbstractContextManager[Callable[[], bool]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a student is made and taught. `texts`: a file, or "self"; of the loss `sequence` its lines are prompts, of `steps`
    they are JSON. `count`: of the teacher's own texts. `share`: λ of kl beside labels; `reasons`: λ of rationales. `exits`:
    after so many of the student's layers, of the loss of that name. `backend`: where the teacher runs while it teaches, one of
    forward.BACKENDS; auto: on the native core where it can."""

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
    seed: int = 0
    threads: int | None = None
    backend: str = AUTO

    def check(self) -> None:
        """Raise ValueError for what does not go together."""
        unknown = [name for name in self.losses if name not in LOSSES]
        if unknown or not self.losses or len(set(self.losses)) < len(self.losses):
            raise ValueError(f"losses are some of {', '.join(LOSSES)}, each once, not {','.join(self.losses)!r}")
        if len(own := HARD.intersection(self.losses)) > 1:
            raise ValueError(f"{', '.join(sorted(own))} learn from different texts; choose one of them")
        if "steps" in self.losses and self.texts == SELF:
            raise ValueError("the loss steps reads a file of prompts, rationales and answers; name it with texts")
        if ("exits" in self.losses) != bool(self.exits):
            raise ValueError("the loss exits and the layers after which they stand go together; give both or neither")
        if not 0 <= self.share <= 1 or self.temperature <= 0 or self.reasons < 0 or not 8 <= self.window <= CONTEXT:
            raise ValueError(f"share is 0 to 1, temperature above 0, reasons 0 or more, a window 8 to {CONTEXT} tokens")

    def about(self, opened: Opened, backend: str) -> dict[str, Any]:
        """What must be the same where a training goes on: all but how long it is, and by how many threads."""
        values = asdict(self) | {"backend": backend}
        for name in ("budget", "prompts", "threads", "as_draft"):
            values.pop(name)
        if not self.exits:  # so that trainings which were begun before there were any go on
            values.pop("exits")
        data = json.dumps(list(self.prompts)).encode() if self.texts == SELF else Path(self.texts).read_bytes()
        return {"teacher": str(opened.path), **values, "texts": f"{self.texts} {hashlib.sha256(data).hexdigest()[:16]}"}


@dataclass(frozen=True, slots=True)
class Drafting:
    """A student as a draft for its teacher, one token at a time: the share of drafted tokens that were right, before and
    after, and what a token of it costs in the teacher's, by the weights that are read for one if both are stored alike."""

    before: float
    after: float
    cost: float

    @property
    def speed(self) -> float:
        """(1 + α) / (1 + c): tokens in the time of one, if to verify costs no more than a plain step."""
        return (1 + self.after) / (1 + self.cost)


@dataclass(frozen=True, slots=True)
class Result:
    """What a training came to. `tokens` were seen in `steps`, of which so many are `different`; `backend`: where the teacher
    ran; `weights` of the student and of the teacher; judgements are on held-out texts."""

    steps: int
    tokens: int
    different: int
    seconds: float
    backend: str
    weights: tuple[int, int]
    before: Judgement
    after: Judgement
    drafting: Drafting | None = None
    losses: list[float] = field(default_factory=list)  # of this call's steps


def distil(
    teacher: str | Path, out: Path, recipe: Recipe, tell: Progress | None = None, interrupt: Stopped | None = None
) -> Result:
    """Train a student into the folder `out`, which any command then opens; the same call goes on where one was stopped.

    `interrupt` is entered while it trains and says whether to stop. Raises ValueError (WeightError, TokenizerError, HubError)
    for what cannot be, before anything is trained, KeyboardInterrupt once stopped, and OSError.
    """
    recipe.check()
    with alone_in(out):
        return _distil(teacher, out, recipe, tell or Silent(), interrupt)


def _distil(teacher: str | Path, out: Path, recipe: Recipe, tell: Progress, interrupt: Stopped | None) -> Result:
    work = out / "work"
    threads = recipe.threads or torch.get_num_threads()
    if (out / CONFIG).exists() and not work.exists():
        raise ValueError(f"{out} holds a model; name another folder")
    opened = open_model(teacher)
    if opened.config.encoder or opened.config.source is not None:
        raise ValueError(f"{opened.name} is no decoder; a teacher writes token by token")
    backend = backend_of(recipe.backend, opened, MAPS in recipe.losses)
    about = recipe.about(opened, backend)
    tell.start(f"loading {opened.path.name}")
    student = student_of(recipe.student, opened, recipe.seed)
    settings_of(student.opened, student.model.config)  # what cannot be written is refused now
    if recipe.exits:
        check_exits(recipe.exits, student.model.config)
    if MAPS in recipe.losses:
        check_maps(opened.config, student.model.config)
    begin(work, about)
    window = min(recipe.window, opened.config.max_position, student.model.config.max_position)
    learned, held = held_apart(_items(opened, work, recipe, window, tell), HELD, recipe.seed)
    tell.start("judging")
    teaching = forward_of(backend, opened, window, recipe.threads, MAPS in recipe.losses)
    lesson = Lesson(teaching, student, recipe.losses, recipe.temperature, recipe.share, recipe.exits)
    before, accepted = before_training(lesson, opened, work, held, recipe)
    torch.set_num_threads(threads)  # what runs natively leaves torch one
    rate = recipe.rate or (FRESH_RATE if student.fresh else RATE)
    run = Run(lesson.tensors, work, recipe.budget, rate)
    losses = train(run, lesson, learned, recipe, tell, interrupt or nullcontext(lambda: False))
    tell.start("judging")
    save(out, student)
    drafting, large = None, describe(opened.config)
    if accepted is not None:
        cost = read_weights(student.model) / read_weights(large)
        drafting = Drafting(accepted, _accepted(opened, out, held, recipe), cost)
    tokens, different = tokens_seen(learned, run.steps, recipe)
    weights = student.model.num_parameters, large.num_parameters
    result = Result(run.steps, tokens, different, run.spent, backend, weights, before, lesson.judge(held), drafting, losses)
    tell.finish()
    write_json(out / SHOWN, {**about, **asdict(result), "losses": losses[-1:]})
    return result


def tokens_seen(learned: Sequence[Item], steps: int, recipe: Recipe) -> tuple[int, int]:
    """By so many steps, and how many of them are different."""
    tokens = sum(_length(item) for step in range(steps) for item in batch_of(learned, step, recipe.batch, recipe.seed))
    return tokens, min(tokens, sum(map(_length, learned)))


def _length(item: Item) -> int:
    return sum(len(one.tokens) for one in item)


def read_weights(model: Model) -> int:
    """Weights that are read for a token: a table of tokens counts where it is the head, too."""
    config = model.config
    return model.num_parameters - (0 if config.tied_head else config.vocab_size * config.hidden_size)


def _items(opened: Opened, work: Path, recipe: Recipe, window: int, tell: Progress) -> list[Item]:
    """What there is to learn from, `window` tokens at most each; kept in `work`."""
    path = work / "examples.json"
    if path.is_file():
        return read_items(path)
    if "steps" in recipe.losses:
        items = reasoned(Path(recipe.texts), opened.tokenizer, opened.tokenizer.eos_id, recipe.reasons, window)
    elif "sequence" in recipe.losses:
        items = _sequences(opened, recipe, window, tell)
    else:
        tokens = recipe.count * window if recipe.texts == SELF else ALL
        items = windows(draw_texts(opened, recipe.texts, tokens, recipe.seed, tell, window, recipe.threads or 0))
    with atomic_write(path) as part:
        write_items(part, items)
    return items


def _sequences(opened: Opened, recipe: Recipe, window: int, tell: Progress) -> list[Item]:
    """Prompts, the caller's or the teacher's own, with its answers."""
    with open_writer(opened, recipe.threads) as llm:
        if recipe.prompts:
            prompts = [asked_tokens(llm, prompt) for prompt in recipe.prompts]
        else:
            prompts = own_prompts(llm, recipe.count, recipe.seed)
        prompts = [prompt for prompt in prompts if len(prompt) <= window // 2]
        if not prompts:
            raise ValueError(f"no prompt is short enough: half of a window is {window // 2} tokens; use a longer window")
        tell.start("answers of the teacher", len(prompts), unit="prompts")
        return answered(llm, prompts, window // 2, tell.advance)


def before_training(
    lesson: Lesson, opened: Opened, work: Path, held: Sequence[Item], recipe: Recipe
) -> tuple[Judgement, float | None]:
    """What the student is worth untrained, and what is accepted of its drafts where that is asked; kept in `work`."""
    path = work / "before.json"
    known = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    judgement = Judgement(**known["judgement"]) if known else lesson.judge(held)
    accepted = known.get("accepted")
    if recipe.as_draft and accepted is None:
        if (work / "checkpoint.safetensors").exists():
            raise ValueError(f"{work} was begun without as_draft, and what it accepted then is not known; begin again with it")
        untrained = work / "untrained"
        save(untrained, lesson.student)
        accepted = _accepted(opened, untrained, held, recipe)
        shutil.rmtree(untrained)
    write_json(path, {"judgement": asdict(judgement), "accepted": accepted})
    return judgement, accepted if recipe.as_draft else None


def _accepted(opened: Opened, folder: Path, held: Sequence[Item], recipe: Recipe) -> float:
    """Of tokens that a folder drafts, one at a time, where the teacher goes on from held-out texts."""
    room = context_of(opened) // 2
    prompts = [item[0].given[-room:] for item in held]
    how = SamplingParams(temperature=0.0, max_tokens=min(room, ANSWER), ignore_eos=True)
    return acceptance(opened, folder, "draft", prompts, 1, how, recipe.threads)[0]


def train(run: Run, lesson: Lesson, learned: Sequence[Item], recipe: Recipe, tell: Progress, interrupt: Stopped) -> list[float]:
    """To the end of the budget; the losses on the way."""
    losses: list[float] = []
    by_steps = recipe.budget.steps is not None
    total = recipe.budget.steps or round(60 * (recipe.budget.minutes or 0.0))
    done = run.steps if by_steps else int(run.spent)
    tell.start("training", max(1, total), done, "steps" if by_steps else "seconds")

    def seen(loss: float) -> None:
        nonlocal done
        losses.append(loss)
        now = run.steps if by_steps else int(run.spent)
        tell.advance(now - done, f"step {run.steps}, loss {loss:.3f}")
        done = now

    with interrupt as stopped:
        run.go(lambda step: lesson.learn(batch_of(learned, step, recipe.batch, recipe.seed)), seen, stopped)
    return losses


def save(folder: Path, student: Student) -> None:
    """A student as a folder that any command opens: matrices in bfloat16, vectors in float32; config.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: x.detach().to(torch.bfloat16 if x.dim() > 1 else torch.float32).contiguous()
        for name, x in stored_tensors(student.model, "safetensors").items()
    }
    with atomic_write(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    write_words(student.opened, folder)
    write_json(folder / CONFIG, settings_of(student.opened, student.model.config))
