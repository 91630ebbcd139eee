"""Exits of an encoder-decoder: early exit and drafts by exits use the code of decoders."""

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.backends.native.encoder import NativeEncoder
from headrace.data.params import SamplingParams
from headrace.data.sources import Tokens
from headrace.kv.pool import KVPool
from headrace.llm import LLM
from headrace.ops.context import FeedRows, build
from headrace.runner.heads import HeadInputs
from headrace.startup import heads as files
from headrace.startup.opening import open_model
from headrace.training.teacher import read_teacher
from headrace.training.texts import Shards
from tests.cli_shell import Shell
from tests.early_exits import played, write_exits
from tests.tiny_sources import PAD, VOCAB, WORDS, loaded, oracle, source_of, write_tiny_marian

AFTER = 2
TEXTS = ["a dog runs on the grass .", "un chien court sur l' herbe .", "la la la", "the dog ."]
GREEDY = SamplingParams(temperature=0.0, no_repeat_ngram=1, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_marian(tmp_path_factory.mktemp("marian"))


@pytest.fixture(scope="module")
def exits(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that reads the rows as they are, through the model's own head."""
    return write_exits(tmp_path_factory.mktemp("exits"), folder, AFTER)


def opened(folder: Path, backend: str = "native", **settings: Any) -> LLM:
    more = {"dtype": "float64"} if backend == "torch" else {}
    return LLM(folder, threads=1, device="cpu", backend=backend, **{"speculate": None, **more, **settings})


def middle(llm: LLM) -> float:
    """A threshold by which about half of the tokens leave."""
    outputs = llm.generate(TEXTS, GREEDY.replace(exit_threshold=1.01))
    sure = [one.confidence for output in outputs for one in output.outputs[0].exits or () if one.confidence is not None]
    return sorted(sure)[len(sure) // 2]


class Reference:
    """Every token from all tokens before it, computed anew in float64: the exit is asked, then who writes is chosen. No token
    comes twice."""

    def __init__(self, exits: Path, folder: Path) -> None:
        self.model: Any = loaded(oracle("marian").float().double())
        self.heads = files.load(exits, open_model(folder))
        self.inputs = HeadInputs(self.heads)
        self.exited = 0

    @torch.inference_mode()
    def output(self, source: list[int], threshold: float, count: int) -> list[int]:
        made = [PAD]
        while len(made) <= count:
            x, left = self._rows(source, made)
            said = torch.softmax(self._exit(left), -1)
            leaves = len(made) > 1 and float(said.max()) >= threshold
            self.exited += leaves
            logits = said if leaves else self.model.head(x[None])[0]
            made.append(int(logits.index_fill(0, torch.tensor(made), -torch.inf).argmax()))
        return made[1:]

    def _rows(self, source: list[int], ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The last token's row after all layers, and at the exit."""
        pool = KVPool(self.model.config, 16, 8, torch.float64)
        EagerProgram(self.model, pool).encode([(Tokens(tuple(source)), range(8, 16))])
        ctx = build(pool, [FeedRows(ids, range(8), source=len(source), source_table=range(8, 16))])
        x, left = self.model.embed(ctx), None
        for layer in range(self.model.config.num_layers):
            left = x if layer == AFTER else left
            x = self.model.layer(layer, x, ctx)
        assert left is not None
        return x[-1], left[-1]

    def _exit(self, left: torch.Tensor) -> torch.Tensor:
        made, weight = self.inputs.at_exit(0, left[None])[0].double(), self.inputs.tensors["norm.weight"].double()
        normed = torch.nn.functional.rms_norm(made, made.shape, weight, self.model.config.norm_eps)
        logits = self.model.tokens.weight @ normed + self.model.output.bias
        return logits.index_fill(0, torch.tensor([PAD]), -torch.inf)


def test_exits_equal_the_reference(folder: Path, exits: Path) -> None:
    reference = Reference(exits, folder)
    with opened(folder, "torch", exits=exits) as llm:
        threshold = middle(llm)
        outputs = llm.generate(TEXTS, GREEDY.replace(exit_threshold=threshold))
    for output in outputs:
        assert output.outputs[0].token_ids == reference.output(output.prompt_token_ids, threshold, 20)
    assert 0.2 * 20 * len(TEXTS) < reference.exited < 0.8 * 20 * len(TEXTS)


@pytest.mark.parametrize("state", ["deferred", "propagate"])
def test_outputs_in_a_batch_equal_those_alone(folder: Path, exits: Path, state: str) -> None:
    """In a batch, from the cache, preempted, with several children, beside plain requests."""
    with opened(folder, exits=exits, exit_state=state) as llm:
        threshold = middle(llm)
        leaves = GREEDY.replace(exit_threshold=threshold)
        ways = [leaves, leaves.replace(temperature=0.8, seed=3, n=2), GREEDY]
        jobs = [(llm.tokenizer.encode(text), params) for text in TEXTS for params in ways]
        alone = []
        for job in jobs:
            with opened(folder, exits=exits, exit_state=state, enable_prefix_caching=False) as quiet:
                alone += played(quiet.engine, [job])
        for preempt in (0, 0, 3):
            assert played(llm.engine, jobs, preempt) == alone
        assert llm.engine.scheduler.preemptions > 0
    assert alone[0] != alone[2], "nothing has left"


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_an_unreachable_threshold_changes_nothing(folder: Path, exits: Path, backend: str) -> None:
    asked = GREEDY.replace(logprobs=1)
    with opened(folder, backend) as llm:
        plain = llm.generate(TEXTS, asked)
    with opened(folder, backend, exits=exits) as llm:
        made = llm.generate(TEXTS, asked.replace(exit_threshold=1.01))
    for one, other in zip(made, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        for mine, its in zip(one.outputs[0].logprobs or (), other.outputs[0].logprobs or (), strict=True):
            assert mine.logprob == (its.logprob if backend == "native" else pytest.approx(its.logprob, abs=1e-9))


def test_a_source_is_encoded_once_with_early_exits(folder: Path, exits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    encode = NativeEncoder._encode
    monkeypatch.setattr(NativeEncoder, "_encode", lambda self, group: (counts.append(len(group)), encode(self, group))[1])
    with opened(folder, exits=exits) as llm:
        llm.generate(TEXTS, GREEDY.replace(exit_threshold=0.0, exit_criterion="saturation"))
    assert counts == [len(TEXTS)]


@lru_cache(maxsize=1)
def sources() -> str:
    return "".join(f"{' '.join(WORDS[at % 14 :][:6])} {WORDS[at % 11]}\n" for at in range(34))


def test_exits_are_trained_and_draft(folder: Path, shell: Shell, tmp_path: Path) -> None:
    """On what the model makes of the caller's sources; then they draft, and no token changes."""
    file, out = tmp_path / "sources.txt", tmp_path / "out"
    file.write_text(sources())
    quick = ("--texts", "34", "--minutes", "0.01", "--max-tokens", "12", "--batch", "4", "--threads", "1", "--vocab", "64")
    code, table, said = shell("train-heads", folder, "-o", out, "--kind", "exit", "--exits", "1,2", "-i", file, *quick)
    assert code == 0, said
    assert "exit agrees" in table
    info = json.loads((out / "heads.json").read_text())
    assert (info["kind"], info["layers"]) == ("exit", [1, 2])
    texts = Shards(out / "work/texts").read()
    assert all(text.source is not None and text.source[-1] == 0 for text in texts)  # the end of a source
    assert all(int(text.tokens[0]) == PAD and text.answer == 1 and text.hidden.shape[1] == 3 * 32 for text in texts)
    known = files.load(out, open_model(folder)).vocab
    assert PAD not in known
    assert len(known) == 64
    assert known.max() < VOCAB
    with opened(folder) as llm:
        plain = [one.outputs[0].token_ids for one in llm.generate(TEXTS, GREEDY)]
    for backend in ("native", "torch"):
        with opened(folder, backend, draft=out, speculate="heads", draft_tokens=2) as llm:
            made = llm.generate(TEXTS, GREEDY)
        assert sum(one.metrics.drafted for one in made) > 20
        assert backend == "torch" or [one.outputs[0].token_ids for one in made] == plain


def test_unsupported_heads_are_refused(folder: Path, shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "sources.txt"
    file.write_text(sources())
    for more, match in (
        (("--kind", "exit"), "cannot generate its own sources"),
        (("--kind", "feature", "-i", file), "an encoder-decoder can have exits only"),
    ):
        code, _, said = shell("train-heads", folder, "-o", tmp_path / "out", "--texts", "34", *more)
        assert code == 1
        assert match in said


@pytest.mark.parametrize("kind", ["marian", "t5", "t5-gated"])
def test_exits_learn_from_the_distribution_of_the_model(kind: str) -> None:
    """Its distribution over the exits' tokens, of rows after its last layer; the control: one that is read otherwise."""
    theirs = oracle(kind)
    model, random = loaded(theirs), torch.Generator().manual_seed(3)
    opened: Any = SimpleNamespace(config=model.config, source=source_of(theirs), name=kind)
    vocab = torch.arange(2, 60)
    teacher = read_teacher(opened, vocab)
    rows = torch.randn(50, 32, generator=random) * 0.7
    wanted = torch.softmax(model.head(rows.double())[:, vocab], -1)
    assert float((teacher.probabilities(rows) - wanted).abs().max()) < 0.02
    wrong = replace(teacher, bias=None) if kind == "marian" else replace(teacher, norm=teacher.norm * 1.5)
    assert float((wrong.probabilities(rows) - wanted).abs().max()) > 0.05


def test_translate_takes_exits_and_a_draft(folder: Path, exits: Path, shell: Shell) -> None:
    """Tokens leave where it is asked for, and are summed up; drafts change none."""
    common = [TEXTS[0], "--max-tokens", "8", "--threads", "1"]
    leaves = ["--exits", str(exits), "--exit-threshold", "0"]
    with opened(folder, exits=exits) as llm:
        params = (SamplingParams(temperature=0.0, max_tokens=8, exit_threshold=least) for least in (1.01, 0.0))
        whole, left = (llm.generate(TEXTS[0], one)[0].outputs[0] for one in params)
    code, out, said = shell("translate", str(folder), *common, *leaves, "--show-exits")
    assert (code, out.strip()) == (0, left.text.strip())
    assert f"after {AFTER} of 3 layers: {len(left.token_ids) - 1} tokens" in said
    record = json.loads(shell("translate", str(folder), *common, *leaves, "--json")[1])
    assert [one["layers"] for one in record["exits"]] == [one.layers for one in left.exits or ()]
    assert (record["translation"], record["tokens"]) == (left.text.strip(), len(left.token_ids))
    drafts = ["--draft", str(folder), "--speculate", "draft", "--draft-tokens", "3"]
    for more in (drafts, ["--exits", str(exits)]):
        code, out, said = shell("translate", str(folder), *common, *more)
        assert (code, out.strip()) == (0, whole.text.strip()), said
    for more, says in (
        (["--exit-threshold", "0"], "--exit-threshold needs exits of the model: --exits FOLDER"),
        ([*leaves, "--beams", "2"], "--exit-threshold does not go with beam search"),
        (["--beams", "2", "--exit-criterion", "margin"], "--exit-criterion goes with --exit-threshold"),
        ([*leaves[:2], "--exit-criterion", "margin"], "--exit-criterion goes with --exit-threshold"),
        (["--show-exits"], "--show-exits goes with --exits FOLDER"),
    ):
        code, _, said = shell("translate", str(folder), *common, *more)
        assert code == 2
        assert says in " ".join(said.split())
