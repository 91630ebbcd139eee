"""bench exits of a decoder: audits agree with the engine, and the command prints the derived figures."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import exit_guarantee, exit_speed
from headrace.bench import early_exit_audit as audits
from headrace.bench.early_exit import ExitRule, bytes_a_step, checks, perturbed, rule_of, thresholds
from headrace.bench.early_exit_audit import ExitPredictions, Text, audit, criteria_of
from headrace.data.params import SamplingParams
from headrace.data.plan import Exited
from headrace.llm import LLM
from headrace.runner.early_exit import EarlyExit
from headrace.runner.heads import EXIT, Heads
from headrace.startup import heads as files
from headrace.startup.opening import open_model
from headrace.startup.thresholds import CalibratedThreshold, save
from headrace.training.exit_heads import WeightBytes
from headrace.training.head_kinds import initial_tensors
from headrace.training.teacher import read_teacher
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf

PROMPTS = ("The mill stands by", "A wheel turns", "Hello")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
AFTER = (2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "deep.gguf", layers=4)


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exits that read the rows as they are, and classifiers of random weights."""
    place, opened = tmp_path_factory.mktemp("exits"), open_model(model)
    vocab = torch.arange(opened.config.vocab_size, dtype=torch.int32)
    tensors = initial_tensors(EXIT, read_teacher(opened, vocab.long()), 2) | {"vocab": vocab}
    for number in range(2):
        random = torch.Generator().manual_seed(number)
        tensors[f"sure.{number}.weight"] = torch.randn(opened.config.hidden_size, generator=random)
        tensors[f"sure.{number}.bias"] = torch.zeros(1)
    files.save(place, Heads(EXIT, 2, tensors, AFTER, AFTER[1]), opened, {})
    return place


@pytest.fixture(scope="module")
def llm(model: Path, folder: Path) -> Iterator[LLM]:
    with LLM(model, exits=folder, speculate=None, backend="native", threads=1) as made:
        yield made


def audited(llm: LLM, texts: list[Text], criterion: str) -> list[Exited]:
    """What the engine itself tells of its answers to the same prompts, where it audits."""
    params = GREEDY.replace(exit_threshold=1.01, exit_criterion=criterion, exit_audit=True)
    outputs = llm.generate([text.prompt for text in texts], params)
    assert [one.outputs[0].token_ids for one in outputs] == [text.tokens for text in texts]
    return [one for output in outputs for one in (output.outputs[0].exits or [])[1:]]


def test_an_audit_equals_the_votes_of_the_engine(
    model: Path, folder: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every exit, also of one that tokens do not leave by here: as an engine says where they do. Control: exits that are
    not changed for each other all say what one does."""
    answers = llm.generate(list(PROMPTS), GREEDY)
    texts = [Text(one.prompt_token_ids, one.outputs[0].token_ids) for one in answers]
    heads = files.load(folder, llm.opened)
    assert criteria_of(heads) == audits.CRITERIA
    votes = audit(llm, heads, texts, audits.CRITERIA)
    assert votes.choices[-1].tolist() == votes.actual.tolist() == [token for text in texts for token in text.tokens[1:]]
    assert not votes.agree.all(), "an exit was meant to say something else now and then"
    for number, layers in enumerate(AFTER):
        files.save(tmp_path, Heads(EXIT, 2, heads.tensors, AFTER, layers), llm.opened, {})
        with LLM(model, exits=tmp_path, speculate=None, backend="native", threads=1) as other:
            for criterion in audits.CRITERIA:
                found = audited(other, texts, criterion)
                assert [one.confidence for one in found] == votes.confidence[criterion][number].tolist()
                assert [one.votes for one in found] == [*zip(votes.choices[number], votes.choices[-1], strict=True)]
    assert audited(llm, texts, "max_prob") == audited(llm, texts, "max_prob"), "the engine is as it was"

    @contextmanager
    def unchanged(*_: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(EarlyExit, "exit_at", unchanged)
    wrong = audit(llm, heads, texts, ("max_prob",))
    assert (wrong.choices[0] == wrong.choices[1]).all()
    assert not np.array_equal(wrong.confidence["max_prob"][0], votes.confidence["max_prob"][0])


def test_an_audit_feeds_the_tokens_of_a_given_text(llm: LLM, folder: Path) -> None:
    """Its own tokens come, whatever the model would have written."""
    heads, tokens = files.load(folder, llm.opened), llm.tokenizer.encode("The mill stands by a river.")
    votes = audit(llm, heads, [Text(tokens[:1], tokens[1:])], ("margin",))
    assert votes.actual.tolist() == tokens[2:]
    assert votes.position.tolist() == list(range(1, len(tokens) - 1))
    for at in range(2, len(tokens)):  # what the whole model says of each is what it writes after those before
        assert llm.generate(tokens[:at], GREEDY.replace(max_tokens=1))[0].outputs[0].token_ids == [votes.choices[-1][at - 2]]
    with pytest.raises(ValueError, match="longer than one token"):
        audit(llm, heads, [Text(tokens[:1], tokens[1:2])], ("margin",))


def test_a_falling_threshold_lets_late_tokens_leave() -> None:
    sure, written = np.full(10, 0.75), np.arange(10)
    assert not ExitRule("max_prob", 0.8).exits(sure, written, 10).any()
    falling = ExitRule("max_prob", 0.8, 4.0).exits(sure, written, 10)  # min(1, 0.72 + 0.1 e^(-0.4 t))
    assert falling.tolist() == [0.72 + 0.1 * np.exp(-0.4 * t) <= 0.75 for t in range(10)]
    assert 0 < falling.sum() < 10


def test_thresholds_part_the_tokens_evenly() -> None:
    found = thresholds(np.linspace(0, 1, 101))
    assert found == pytest.approx([1 - 0.05 * step for step in range(1, 20)])
    assert thresholds(np.array([-0.5, 2.0])) == sorted({*thresholds(np.array([-0.5, 2.0]))}, reverse=True)
    assert all(0 <= one <= 1 for one in thresholds(np.array([-0.5, 2.0])))


def test_bytes_of_steps_by_hand() -> None:
    """Four layers of 8 and a head of 16 of 16 tokens, no map: an exit after two layers. A step whose rows all leave reads two
    layers and the exit; another one all layers and both heads; and one row cannot lag by more than seven tokens."""
    weights = WeightBytes(32.0, 16.0, 4, 16, 0)
    heads = Heads(EXIT, 1, {"vocab": torch.arange(16)}, (2,), 2)
    first, early, late = Exited(4), Exited(2, 0.9), Exited(4, 0.1)
    below, whole = (16 + 16) / 48, (32 + 16 + 16) / 48
    assert bytes_a_step([[first, early, late]], heads, weights) == pytest.approx((below + whole) / 2)
    assert bytes_a_step([[first, early], [first, late]], heads, weights) == pytest.approx(whole)
    assert bytes_a_step([[first, early], [first, early]], heads, weights) == pytest.approx(below)
    eight = [first, *[early] * 8]  # the eighth brings the layers above up to date, and asks the head nothing
    assert bytes_a_step([eight], heads, weights) == pytest.approx((8 * below + 16 / 48) / 8)
    assert checks(weights, heads, 4) == {"every_layer": 2.0, "every_layer_short": 2.0, "one_exit": pytest.approx(4 / 3)}


def test_a_late_change_costs_less_than_an_early_one(llm: LLM) -> None:
    """An answer to the token changed is the same, and what comes after is the model's own."""
    plain = GREEDY.replace(max_tokens=16, logprobs=2)
    found = perturbed(llm, llm.generate(list(PROMPTS), plain), plain)
    assert [one["place"] for one in found] == [0.0, 0.25, 0.5, 0.75]
    assert all(one["n"] == 3 for one in found)
    assert found[0]["lost"] > found[-1]["lost"] > 0
    kept = [1 - one["lost"] for one in found]
    assert all(share >= place - 1e-9 for share, place in zip(kept, (0, 0.25, 0.5, 0.75), strict=True))


def test_the_timed_rule_is_the_option_or_the_calibrated_rule(folder: Path, tmp_path: Path) -> None:
    assert rule_of(tmp_path, None, None) == ExitRule("max_prob", 0.9)
    assert rule_of(tmp_path, "margin", 0.4) == ExitRule("margin", 0.4)
    for rule, state in ((("margin", 0.7, 0.0), "deferred"), (("max_prob", 0.6, 2.0), "propagate")):
        save(tmp_path, CalibratedThreshold(*rule, 64, "text", 0.1, 0.05, 59, 0.01, 3.5, 0.2, "", state))
    assert rule_of(tmp_path, None, None) == rule_of(tmp_path, "margin", None) == ExitRule("margin", 0.7)
    with pytest.raises(ValueError, match="no threshold of max_prob was calibrated for these exits; give one"):
        rule_of(tmp_path, "max_prob", None)
    with pytest.raises(ValueError, match="unknown criterion 'entropy' of an exit"):
        rule_of(tmp_path, "entropy", 0.5)
    with pytest.raises(ValueError, match="exit_threshold"):
        rule_of(tmp_path, "margin", 3.0)


def test_votes_agree_token_by_token() -> None:
    votes = ExitPredictions(
        np.array([2, 3, 4]), np.array([[1, 5, 3], [1, 2, 5], [1, 2, 3]]), {}, np.array([1, 2, 9]), np.arange(3)
    )
    assert votes.agree.tolist() == [[True, False, True], [True, True, False]]


def test_figures_from_the_command_line(shell: Shell, model: Path, folder: Path, tmp_path: Path) -> None:
    prompts, figures, plot = tmp_path / "prompts.txt", tmp_path / "figures.json", tmp_path / "exits.svg"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    sizes = ("-m", "8", "--rounds", "1", "--threads", "1", "--threshold", "0.2", "--criterion", "max_prob")
    arguments = ("--exits", folder, "-i", prompts, *sizes, "--json", figures, "--plot", plot)
    code, out, err = shell("bench", "exits", model, *arguments)
    assert code == 0, err
    found = json.loads(figures.read_text())
    assert [one["layers"] for one in found["exits"]] == list(AFTER)
    assert [one["batch"] for one in found["batches"]] == [1, 2, 4, 8]
    assert all(one["bytes"] > 0 and one["speedup"] > 0 for one in found["batches"])
    for exit in found["exits"]:
        assert set(exit["curves"]) == set(audits.CRITERIA)
        for curves in exit["curves"].values():
            shares = [one["share"] for one in curves["steady"]]
            assert shares == sorted(shares)
            assert all(one["layers"] == pytest.approx(4 - one["share"] * (4 - exit["layers"])) for one in curves["steady"])
    assert found["oracle"]["destructive"] == 0.0, "the model is always right about itself"
    assert AFTER[0] <= found["oracle"]["needed"] <= 4
    assert plot.read_text().startswith("<svg")
    for said in ("agrees", "falling: early", "by bytes", "token replaced after", "stops at the first exit that agrees"):
        assert said in out
    wrong = "--classifier and --data, of an encoder, or --exits and --input, of a decoder"
    for some in (("--exits", folder), ("-i", prompts), ("--exits", folder, "-d", prompts), ("-d", prompts), ()):
        code, _, err = shell("bench", "exits", model, *some)
        assert code == 2
        assert wrong in " ".join(err.split())


def test_speed_counts_the_layers_of_each_threshold(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 0 all tokens but the first exit at the first of several exits; above 1 none does, the control."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    sizes = ("--max-tokens", "8", "--rounds", "1", "--threads", "1", "--batches", "1", "3")
    exit_speed.main([str(model), str(folder), str(prompts), "--exit-layers", "all", "--thresholds", "0", "1.01", *sizes])
    lines = capsys.readouterr().out.splitlines()
    titles = [line.split(":")[0].strip() for line in lines]
    assert titles == ["batch 1", "threshold 0", "threshold 1.01", "batch 3", "threshold 0", "threshold 1.01"]
    for line in lines[1::3]:
        assert AFTER[0] <= float(line.split()[-2]) < 3
    assert [line.split()[-2] for line in lines[2::3]] == ["4.00", "4.00"]


def guarantee(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    sizes = ("--max-tokens", "24", "--max-model-len", "128", "--prompts", "6", "-n", "4", "--delta", "0.9")
    exit_guarantee.main([*map(str, arguments), *sizes])
    return capsys.readouterr().out.splitlines()


def test_both_states_of_the_layers_above_are_opened(
    model: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def recorded(*arguments: Any, **settings: Any) -> LLM:
        opened.append(settings["exit_state"])
        return LLM(*arguments, **settings)

    monkeypatch.setattr(exit_guarantee, "LLM", recorded)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS * 2) + "\n")
    lines = guarantee(capsys, model, folder, prompts, "--exit-state", "deferred", "propagate")
    assert opened == ["deferred", "propagate"]
    for start in ("deferred, ", "propagate, ", "propagate less deferred, "):
        assert sum(line.startswith(start) for line in lines) == len(exit_guarantee.GRID)


def test_a_cascade_is_redrawn_too(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that is its own smaller model loses nothing, whoever writes; at 0 it writes all but the first token."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS * 2) + "\n")
    lines = [line for line in guarantee(capsys, model, model, prompts, "--cascade") if "larger model" in line]
    assert len(lines) == len(exit_guarantee.GRID)
    assert all(": 0.0000 ± 0.0000 lost" in line for line in lines)
    shares = [float(line.split("lost, ")[1].split()[0]) for line in lines]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.5 > shares[-1] > 0
