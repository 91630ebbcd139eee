"""Exits of a decoder: where they stand, what they cost, and how fresh a text is that they are judged on."""

from pathlib import Path

import pytest
import torch

from headrace.runner.heads import EXIT, HeadInputs, Heads
from headrace.startup.opening import open_model
from headrace.stats.calibration import calibration_error
from headrace.training.exit_heads import (
    ExitReport,
    check,
    confidences,
    default_exits,
    seen_share,
    train_classifiers,
    weight_bytes,
)
from headrace.training.head_kinds import initial_tensors
from headrace.training.heads import TrainedHeads
from headrace.training.teacher import Teacher
from headrace.training.texts import Text
from tests.tiny import tiny_config
from tests.tiny_files import write_tiny_gguf


@pytest.mark.parametrize(("layers", "exits"), [(30, (10, 20, 25)), (24, (8, 16, 20)), (12, (4, 8, 10)), (3, (1, 2)), (2, (1,))])
def test_default_exits_by_layer_count(layers: int, exits: tuple[int, ...]) -> None:
    assert default_exits(layers) == exits
    check(exits, tiny_config(num_layers=layers))


@pytest.mark.parametrize("exits", [(), (0,), (4,), (1, 5), (2, 1), (1, 1), (-1, 2)])
def test_exits_outside_the_model_are_refused(exits: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="ascending, 1 to 3; not"):
        check(exits, tiny_config(num_layers=4))


def test_a_model_has_at_most_16_exits() -> None:
    with pytest.raises(ValueError, match="16 exits at most, not 17"):
        check(range(1, 18), tiny_config(num_layers=20))


def test_weight_bytes_of_a_draft_step(tmp_path: Path) -> None:
    """The layers' bytes and those of the head's rows, as the file has them, and the map's own."""
    opened = open_model(write_tiny_gguf(tmp_path / "tiny.gguf", layers=3))
    source, config = opened.source, opened.config
    sizes = {name: source.info(name).nbytes for name in source.names()}
    layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
    head, own = sizes["output.weight"], config.hidden_size**2
    for exit in (1, 2):
        for vocab in (config.vocab_size, config.vocab_size // 2):
            read = layers * exit / 3 + head * vocab / config.vocab_size + own
            assert weight_bytes(opened).share(exit, vocab) == pytest.approx(read / (layers + head))


def test_the_promised_speedup_is_bounded_by_the_bytes() -> None:
    def promise(agreement: float, cost: float) -> float:
        return ExitReport(1, 0.0, agreement, 0.0, 1.0, cost).promise

    assert promise(0.0, 0.5) == pytest.approx(1 / 1.5)
    assert promise(1.0, 0.5) == pytest.approx(6 / 3.5)
    assert promise(0.645, 0.629) == pytest.approx(1.645 / 1.629)


def test_confidence_against_how_often_it_is_right() -> None:
    """Two bins: nine of ten where it says 0.9 is what it says; half where it says 0.7 is two tenths off for half of all."""
    sure = torch.tensor([0.9] * 10 + [0.7] * 10)
    right = torch.tensor([True] * 9 + [False] + [True, False] * 5)
    assert calibration_error(sure, right, 10) == pytest.approx(0.1)
    assert calibration_error(sure[:10], right[:10], 10) == pytest.approx(0.0, abs=1e-6)
    assert calibration_error(torch.ones(4), torch.zeros(4, dtype=torch.bool), 10) == 1.0


def test_an_exit_fed_the_last_row_agrees() -> None:
    """And one that is given another text's does not: of the same tensors, the rows decide."""
    config = tiny_config()
    random, width = torch.Generator().manual_seed(2), config.hidden_size
    table = torch.randn(config.vocab_size, width, generator=random)
    teacher = Teacher(config, table.bfloat16(), torch.ones(width), table.bfloat16())
    last, other = (torch.randn(30, width, generator=random) for _ in range(2))
    text = Text(torch.zeros(30, dtype=torch.int64), 6, torch.cat((last, other, last), 1).bfloat16())
    sure, right = confidences(initial_tensors("exit", teacher, 2), teacher, [text])
    assert sure.shape == right.shape == (2, 25)
    assert bool(right[0].all())
    assert float(right[1].float().mean()) < 0.2


def test_a_classifier_knows_when_its_exit_is_right(tmp_path: Path) -> None:
    """Rows are the last ones, or those of another text, which a direction of theirs tells: then the classifier does, on rows
    that it was not trained on. One trained on labels in any order does not."""
    opened = open_model(write_tiny_gguf(tmp_path / "tiny.gguf"))
    config, random = opened.config, torch.Generator().manual_seed(4)
    width = config.hidden_size
    table = torch.randn(config.vocab_size, width, generator=random)
    teacher = Teacher(config, table.bfloat16(), torch.ones(width), table.bfloat16())

    def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        last, other = torch.randn(2, count, width, generator=random)
        right = torch.rand(count, generator=random) < 0.5
        left = torch.where(right[:, None], last, other)
        last[:, 0] = left[:, 0] = torch.where(right, 2.0, -2.0)
        return torch.cat((left, last), 1).bfloat16(), right

    def judged(learned: torch.Tensor) -> float:
        text = Text(torch.zeros(len(learned), dtype=torch.int64), 1, learned)
        # Texts that are not fitted on: those that trained the exits, and those that the report judges by.
        wrong = Text(text.tokens, 1, learned.flip(0).roll(7, 1))
        made = TrainedHeads(
            Heads(EXIT, 1, initial_tensors(EXIT, teacher, 1), (1,), 1), opened, teacher, {}, [], [wrong], [wrong, text]
        )
        inputs = HeadInputs(Heads(EXIT, 1, train_classifiers(made), (1,), 1))
        fresh, right = rows(100)
        sure = torch.tensor([inputs.confidence(0, row.double().numpy()) for row in fresh[:, :width]])
        return float(((sure > 0.5) == right).float().mean())

    learned, _ = rows(600)
    shuffled = torch.cat((learned[torch.randperm(600, generator=random), :width], learned[:, width:]), 1)
    assert judged(learned) > 0.9
    assert judged(shuffled) < 0.75


def test_seen_share_counts_repeated_runs_of_answers() -> None:
    """Runs of eight tokens of the answers; prompts do not count."""

    def text(prompt: list[int], answer: list[int]) -> Text:
        tokens = torch.tensor([*prompt, *answer])
        return Text(tokens, len(prompt), torch.zeros(len(tokens), 1))

    learned = [text([1, 2], list(range(20)))]
    assert seen_share([text([7], list(range(20)))], learned) == 1.0
    assert seen_share([text(list(range(20)), list(range(50, 70)))], learned) == 0.0
    assert seen_share([text([], [*range(12), *range(50, 58)])], learned) == pytest.approx(5 / 13)
    assert seen_share([text([], [1, 2, 3])], learned) == 0.0
