"""Processors of the user's own: what they are given, what they may return, and how they fail."""

import numpy as np
import pytest
import torch

from headrace.decoding.host import apply_processors
from headrace.decoding.processors import History, LengthNudge, ProcessorError, check_processors


class Recorder:
    scope = "path"

    def __init__(self):
        self.calls = []

    def apply(self, logits, history, paths):
        self.calls.append((logits.clone(), history, paths))
        logits += 1
        return logits


class Returns:
    scope = "pointwise"

    def __init__(self, value):
        self.value = value

    def apply(self, logits, history, paths):
        return self.value(logits) if callable(self.value) else self.value


HISTORY = History(prompt=[1, 2], output=[3])


def test_processors_run_in_order_on_a_copy():
    first, second = Recorder(), Recorder()
    row = torch.tensor([0.0, 1.0])
    out = apply_processors([first, second], row, HISTORY)
    assert out.tolist() == [[2.0, 3.0]]
    assert second.calls[0][0].tolist() == [[1.0, 2.0]]
    assert first.calls[0][1:] == (HISTORY, ((),))
    assert row.tolist() == [0.0, 1.0]


def test_rows_of_a_draft_come_with_their_paths():
    nudge = LengthNudge(end_id=0, start=2, slope=0.5)
    paths = [(), (7,), (7, 8), (7, 8, 9)]
    out = apply_processors([nudge], np.zeros((4, 3), dtype=np.float32), HISTORY, paths)
    assert out[:, 0].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert not out[:, 1:].any()
    alone = [apply_processors([nudge], torch.zeros(3), History([1, 2], [3, *path]))[0].tolist() for path in paths]
    assert out.tolist() == alone  # scope "path": at a draft node as if the draft were committed


def test_numpy_arrays_may_be_returned():
    assert apply_processors([Returns(lambda z: z.numpy() * 2)], torch.ones(3), HISTORY).tolist() == [[2.0] * 3]


def test_no_processor_changes_nothing():
    row = torch.tensor([[0.5, float("-inf")]])
    assert torch.equal(apply_processors([], row, HISTORY), row)


def fail(logits):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (fail, "Returns raised KeyError: 'no such thing'"),
        (None, "Returns returned NoneType, not the logits"),
        (lambda z: z[:, :1], r"Returns returned shape \[1, 1\], not \[1, 3\]"),
        (lambda z: z * float("nan"), "Returns returned NaN"),
    ],
)
def test_a_failing_processor_is_named(value, message):
    with pytest.raises(ProcessorError, match=message):
        apply_processors([Returns(value)], torch.ones(3), HISTORY)


def test_an_invalid_processor_is_refused_before_the_run():
    check_processors([Recorder(), LengthNudge(0, 5)])
    with pytest.raises(ProcessorError, match=r"object has no method apply"):
        check_processors([object()])
    wrong = Recorder()
    wrong.scope = "global"
    with pytest.raises(ProcessorError, match="scope must be one of pointwise, path, stateful, not 'global'"):
        check_processors([wrong])
