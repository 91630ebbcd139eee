"""Distillation: gradients against finite differences, losses that are nothing where nothing differs, and what is learned."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.nn.functional import log_softmax, softmax

from headrace.kv.pool import FreshPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.ops.vocabulary import attention
from headrace.runner.record import record
from headrace.startup.opening import open_model
from headrace.text.tokenizer import Tokenizer
from headrace.training import losses
from headrace.training.examples import LABEL, REASON, Example, batch_of, held_apart, reasoned, windows
from headrace.training.losses import LOSSES, DistillationLoss
from headrace.training.run import Budget, Run, rate_at, record_job
from headrace.training.sequence_forward import SequenceOutput, attention_map, run_sequence
from headrace.training.students import Student, ends, kept_layers, narrowed, spread, student_of
from headrace.training.teacher_forward import BACKENDS, NativeForward, TorchForward, backend_of
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.feeding import feed
from tests.tiny import VOCAB, tiny_config, tiny_model
from tests.tiny_files import write_tiny_gguf

DOUBLE = torch.float64
TEXT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
LOGITS = (4, 9)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def student(model: Model, pairs: list[int] | None = None) -> Student:
    return Student(model, None, pairs or list(range(model.config.num_layers)))  # type: ignore[arg-type]  # nothing is written


def by_differences(value: Callable[[], float], x: torch.Tensor, place: tuple[int, ...], step: float = 1e-5) -> float:
    """The derivative by one number, from both sides."""
    was = x[place].item()
    with torch.no_grad():
        x[place] = was + step
        above = value()
        x[place] = was - step
        below = value()
        x[place] = was
    return (above - below) / (2 * step)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_the_gradient_of_kl(temperature: float) -> None:
    """λ T (q_T − p_T) in each row, of a mean over rows; without T² it would be smaller by T²."""
    ours, theirs, share = drawn(*LOGITS), drawn(*LOGITS, seed=1), 0.3
    expected = share * temperature * (softmax(ours / temperature, -1) - softmax(theirs / temperature, -1)) / LOGITS[0]
    for place in ((0, 0), (2, 5), (3, 8)):
        found = by_differences(lambda: share * losses.softened_kl(ours, theirs, temperature).item(), ours, place)
        assert found == pytest.approx(expected[place].item(), abs=1e-9)
        if temperature != 1.0:
            forgotten = by_differences(
                lambda: share * losses.softened_kl(ours, theirs, temperature).item() / temperature**2, ours, place
            )
            assert forgotten != pytest.approx(expected[place].item(), abs=1e-9)


def test_kl_at_a_high_temperature_compares_logits() -> None:
    """Hinton et al.: the gradient tends to (z − v) / N of logits whose mean is 0."""
    ours, theirs = (x - x.mean(-1, keepdim=True) for x in (drawn(1, 9), drawn(1, 9, seed=1)))
    ours.requires_grad_()
    losses.softened_kl(ours, theirs, 1e4).backward()
    assert ours.grad is not None
    assert torch.allclose(ours.grad, (ours - theirs).detach() / 9, atol=1e-4)


@pytest.mark.parametrize("name", ["kl", "features", "cosine", "attention"])
def test_a_student_that_is_its_teacher_loses_nothing(name: str) -> None:
    teacher, other = tiny_model(), tiny_model(seed=3)
    said = TorchForward(teacher, maps=name == "attention")
    assert abs(DistillationLoss(said, student(teacher), [name], 2.0, 0.5).loss(Example(TEXT)).item()) < 1e-12
    assert DistillationLoss(said, student(other), [name], 2.0, 0.5).loss(Example(TEXT)).item() > 0.01
    judged = DistillationLoss(said, student(teacher), [name], 2.0, 0.5).judge(windows([TEXT]))
    assert (judged.kl, judged.same_choice) == (0.0, 1.0)


def test_exits_count_by_their_number() -> None:
    """One third of the first exit's loss and two of the whole student's; a student that is its teacher still has the first."""
    teacher, other = tiny_model(), tiny_model(seed=3)
    for model in (other, teacher):
        loss = DistillationLoss(TorchForward(teacher), student(model), ["exits"], 2.0, 0.5, (1,)).loss(Example(TEXT)).item()
        passed, rows = run_sequence(model, TEXT, (0,)), slice(0, -1)
        truth = teacher.head(run_sequence(teacher, TEXT).rows[rows])
        early, late = (losses.softened_kl(model.head(x[rows]), truth, 2.0).item() for x in (passed.after[0], passed.rows))
        assert loss == pytest.approx((early + 2 * late) / 3, abs=1e-12)
        assert early > 0.01
        assert (late < 1e-12) == (model is teacher)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients_pass_through_the_model_file(architecture: str) -> None:
    """Also through K and V, which are read from the pool alone."""
    model = tiny_model(tiny_config(architecture))
    weights = dict(model.named_parameters())
    mix = drawn(len(TEXT), VOCAB, seed=5)

    def value() -> float:
        return (model.head(run_sequence(model, TEXT).rows) * mix).sum().item()

    for x in weights.values():
        x.requires_grad_()
    (model.head(run_sequence(model, TEXT).rows) * mix).sum().backward()
    for name, x in weights.items():
        assert x.grad is not None, name
        place = tuple(int(at) for at in torch.unravel_index(x.grad.abs().argmax(), x.shape))
        assert x.grad[place].item() == pytest.approx(by_differences(value, x, place), rel=1e-5), name


class Cut(FreshPool):
    """A pool that keeps no gradients of K and V."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().write(layer, slots, k.detach(), v.detach())


def test_a_pool_without_gradients_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    weight = model.layers[0].qkv.weight.requires_grad_()
    kept, cut = [], []
    for pool, into in ((FreshPool, kept), (Cut, cut)):
        monkeypatch.setattr("headrace.training.sequence_forward.FreshPool", pool)
        weight.grad = None
        model.head(run_sequence(model, TEXT).rows).sum().backward()
        into.append(weight.grad.clone())
    keys = slice(32, 64)  # rows of k and v
    assert kept[0][keys].abs().max() > 1e-3
    assert cut[0][keys].abs().max() == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sequence_forward_equals_the_paged_forward(architecture: str) -> None:
    model = tiny_model(tiny_config(architecture))
    with torch.no_grad():
        whole = model.head(run_sequence(model, TEXT).rows)
    for mode in ("whole", "tokens"):
        (paged,) = feed(model, [TEXT], mode, DOUBLE)
        assert torch.allclose(whole, paged, atol=1e-10)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text"])
def test_attention_maps_reproduce_attention(architecture: str) -> None:
    model = tiny_model(tiny_config(architecture))
    plain, watched = run_sequence(model, TEXT), run_sequence(model, TEXT, recording=record(model, embeds=False))
    assert torch.equal(plain.rows, watched.rows)
    assert [tuple(one.shape) for one in watched.maps] == [(4, len(TEXT), len(TEXT))] * 2
    layer = model.config.layers[0]
    pool = FreshPool(model.config, 2, 16, DOUBLE)
    ctx = build(pool, [FeedRows(TEXT, [0, 1])])
    q, k, v = (drawn(len(TEXT), size, seed=at) for at, size in enumerate((layer.q_size, layer.kv_size, layer.kv_size)))
    how = {"rope": model.ropes[0], "window": layer.window, "scale": 0.4}  # type: ignore[attr-defined]
    made = attention(q, k, v, ctx, 0, **how).view(len(TEXT), 4, 8)
    values = v.view(len(TEXT), -1, 8).repeat_interleave(4 // layer.kv_heads, 1)
    assert torch.allclose(torch.einsum("hqk,khd->qhd", attention_map(q, k, ctx, 0, **how).exp(), values), made, atol=1e-12)
    with pytest.raises(ValueError, match="attention maps of a model with softcap are not taken"):
        attention_map(q, k, ctx, 0, softcap=3.0)


def test_the_loss_excludes_the_prompt() -> None:
    """The loss is of the tokens after it; one that counts the prompt, too, is another."""
    teacher, ours = tiny_model(), tiny_model(seed=3)
    lesson = DistillationLoss(TorchForward(teacher), student(ours), ["steps"], 2.0, 0.5)
    found = lesson.loss(Example(TEXT, first=9)).item()
    logs = log_softmax(ours.head(run_sequence(ours, TEXT).rows), -1)
    expected = -sum(logs[at - 1, TEXT[at]].item() for at in range(9, len(TEXT))) / (len(TEXT) - 9)
    assert found == pytest.approx(expected, abs=1e-12)
    assert lesson.loss(Example(TEXT)).item() != pytest.approx(expected, abs=1e-3)


def test_losses_are_mixed_by_their_weights() -> None:
    teacher, ours = tiny_model(), tiny_model(seed=3)
    both = {}
    for names in (["kl"], ["ce"], ["kl", "ce"], ["cosine"], ["kl", "cosine"]):
        lesson = DistillationLoss(TorchForward(teacher), student(ours), names, 2.0, 0.25)
        both[",".join(names)] = lesson.loss(Example(TEXT)).item()
    assert both["kl,ce"] == pytest.approx(0.25 * both["kl"] + 0.75 * both["ce"], abs=1e-12)
    assert both["kl,cosine"] == pytest.approx(both["kl"] + both["cosine"], abs=1e-12)
    assert set(LOSSES) >= {"features", "attention", "sequence", "steps"}


def test_w42_rationales_are_learned_together_with_labels(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(json.dumps({"prompt": "Two and two?", "rationale": "One more each.", "answer": "Four"}) + "\n")
    tokenizer = Tokenizer.from_gguf(GGUFFile(write_tiny_gguf(tmp_path / "tiny.gguf")).metadata)
    ((label, reason),) = reasoned(path, tokenizer, 7, 0.5, 99)
    assert (label.weight, reason.weight) == (1.0, 0.5)
    assert tokenizer.decode(label.given) == f"{LABEL}Two and two?"
    assert tokenizer.decode(reason.given) == f"{REASON}Two and two?"
    assert tokenizer.decode(label.tokens[label.first : -1]) == " Four"
    assert (label.tokens[-1], reason.tokens[-1]) == (7, 7)
    teacher = tiny_model(tiny_config(vocab_size=512))
    lesson = DistillationLoss(TorchForward(teacher), student(tiny_model(teacher.config, seed=3)), ["steps"], 2.0, 0.5)
    for x in lesson.tensors.values():
        x.requires_grad_()
    wanted = lesson.loss(label).item() + 0.5 * lesson.loss(reason).item()
    assert lesson.backward([(label, reason)]) == pytest.approx(wanted, abs=1e-12)
    assert lesson.backward([(label,)]) != pytest.approx(wanted, abs=1e-3)  # labels alone
    for line, match in (("{", "line 1 is not JSON"), ('{"prompt": "a", "rationale": "b"}', 'no text in "answer"')):
        path.write_text(line)
        with pytest.raises(ValueError, match=match):
            reasoned(path, tokenizer, 7, 0.5, 99)
    path.write_text(json.dumps({"prompt": "a " * 99, "rationale": "b", "answer": "c"}))
    with pytest.raises(ValueError, match="the most are 99"):
        reasoned(path, tokenizer, 7, 0.5, 99)


def test_batches_go_through_all_texts() -> None:
    learned, held = held_apart(windows([[at] * 4 for at in range(11)]), 2, seed=1)
    assert len(held) == 2
    assert not {one.tokens[0] for (one,) in learned} & {one.tokens[0] for (one,) in held}
    seen = [item for step in range(6) for item in batch_of(learned, step, 3, seed=4)]
    for turn in (seen[:9], seen[9:]):
        assert sorted(one.tokens[0] for (one,) in turn) == sorted(one.tokens[0] for (one,) in learned)
    assert seen[:9] != seen[9:]
    with pytest.raises(ValueError, match="too few texts"):
        held_apart(windows([[1, 2, 3]]), 2, seed=1)


def test_a_resumed_run_reaches_the_same_bytes(tmp_path: Path) -> None:
    """Stopped between two steps, or killed within one; a state without the optimiser's would come elsewhere."""

    def trained(folder: Path, kill: int | None = None, forget: bool = False) -> dict[str, torch.Tensor]:
        tensors = {"a.weight": drawn(3, 4).float(), "b": drawn(4).float()}
        target = drawn(3, 4, seed=2).float()
        run = Run(tensors, folder, Budget(steps=8), 0.1)
        if forget:
            run.adam.state.clear()

        def learn(step: int) -> float:
            if step == kill:
                raise RuntimeError("killed")
            loss = (tensors["a.weight"] * (step + 1) + tensors["b"] - target).square().sum()
            loss.backward()
            return loss.item()

        run.checkpoint_seconds = 0.0
        run.train(learn, interrupt=nullcontext(lambda: kill is not None and kill < 0 and run.steps == -kill))
        return {name: x.detach() for name, x in tensors.items()}

    whole = trained(tmp_path / "whole")
    for name, kill, error in (("killed", 5, RuntimeError), ("stopped", -5, KeyboardInterrupt)):
        with pytest.raises(error):
            trained(tmp_path / name, kill)
        assert all(torch.equal(x, whole[key]) for key, x in trained(tmp_path / name).items()), name
    with pytest.raises(RuntimeError):
        trained(tmp_path / "forgetful", 5)
    assert not torch.equal(trained(tmp_path / "forgetful", forget=True)["b"], whole["b"])
    (tmp_path / "whole/checkpoint.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match="is damaged; remove"):
        trained(tmp_path / "whole")


def test_a_nan_loss_ends_a_training(tmp_path: Path) -> None:
    """Before a step with it, which would make all weights none."""
    x = torch.ones(2)
    run = Run({"x": x}, tmp_path, Budget(steps=3), 0.1)

    def learn(step: int) -> float:
        x.grad = torch.ones(2)
        return math.nan if step else 1.0

    with pytest.raises(ValueError, match="the loss of step 1 is not a number"):
        run.train(learn)
    assert (run.steps, bool(x.isfinite().all())) == (1, True)


def test_a_folder_refuses_another_training(tmp_path: Path) -> None:
    record_job(tmp_path, {"student": "depth=2", "losses": ("kl",)})
    record_job(tmp_path, {"student": "depth=2", "losses": ("kl",)})
    with pytest.raises(ValueError, match="another training .student: depth=2 then, depth=3 now"):
        record_job(tmp_path, {"student": "depth=3", "losses": ("kl",)})
    with pytest.raises(ValueError, match="takes steps or minutes"):
        Budget()
    assert rate_at(0.0, 1.0) == pytest.approx(0.05)
    assert rate_at(1.0, 1.0) == pytest.approx(0.02)
    assert Budget(minutes=2.0).share(5, 30.0) == 0.25


def test_students_of_a_teacher(tmp_path: Path) -> None:
    opened = open_model(write_tiny_gguf(tmp_path / "tiny.gguf", layers=5))
    teacher = load_model(opened.source)
    made = student_of("layers:0,2-3", opened)
    assert made.pairs == [1, 2, 4]
    for mine, its in zip(made.model.layers, (0, 2, 3), strict=True):
        assert torch.equal(mine.qkv.weight, teacher.layers[its].qkv.weight)
    assert torch.equal(made.model.tokens.weight, teacher.tokens.weight)  # type: ignore[attr-defined]
    shared = student_of("share=2", opened).model.layers
    assert torch.equal(shared[1].qkv.weight, teacher.layers[1].qkv.weight[:32])  # q alone
    assert spread(3, 5) == [0, 2, 4]
    assert ends(2, 5) == [2, 4]
    small = student_of("depth=2,width=16", opened)
    assert small.fresh
    assert (small.model.config.each_layer.heads, small.model.config.each_layer.kv_heads) == (2, 1)
    assert narrowed(teacher.config, 1, 16).each_layer.ffn == 32  # of 48: 24, as a multiple of 32
    for text, match in (("1,0", "ascending, 0 to 4"), ("0-5", "ascending, 0 to 4"), ("a", "layers are numbers and ranges")):
        with pytest.raises(ValueError, match=match):
            kept_layers(text, 5)
    for text, match in (("width=24", "a multiple of 16"), ("depth=9", "1 to 5 of them, not 9"), ("depth=x", "a student is")):
        with pytest.raises(ValueError, match=match):
            student_of(text, opened)
    wide = tiny_model(tiny_config(heads=8, kv_heads=8, head_dim=4))
    with pytest.raises(ValueError, match="attention maps are compared head by head"):
        DistillationLoss(TorchForward(tiny_model()), student(wide), ["attention"], 2.0, 0.5)


class Shuffled(DistillationLoss):
    """The teacher's rows stand at other tokens."""

    def _run_both(self, tokens: list[int]) -> tuple[SequenceOutput, SequenceOutput]:  # type: ignore[override]
        theirs, ours = super()._run_both(tokens)
        theirs.rows = theirs.rows[torch.randperm(len(theirs.rows), generator=torch.Generator().manual_seed(1))]
        return theirs, ours


def test_a_native_teacher_equals_the_torch_teacher(tmp_path: Path) -> None:
    """Rows after layers, and what its head makes of them, the same each time; torch keeps its threads. Controls: rows of other
    tokens, and of another layer."""
    opened, threads = open_model(write_tiny_gguf(tmp_path / "tiny.gguf", layers=3)), torch.get_num_threads()
    exact, native = TorchForward(load_model(opened.source)), NativeForward(opened, len(TEXT), threads=1)
    theirs, ours, again = exact.run(TEXT, (1, 2)), native.run(TEXT, (1, 2)), native.run(TEXT)
    assert torch.get_num_threads() == threads
    assert torch.equal(ours.rows, again.rows)
    assert torch.equal(ours.rows, ours.after[1])
    for mine, its in ((ours.rows, theirs.rows), (ours.after[0], theirs.after[0])):
        assert losses.feature_distance(mine, its) < 1e-3
    assert losses.feature_distance(ours.after[0], theirs.rows) > 0.05
    assert losses.cosine_distance(native.final(ours.rows), exact.final(theirs.rows)) < 1e-3
    truth = exact.head(theirs.rows)
    assert losses.softened_kl(native.head(ours.rows), truth, 1.0) < 5e-3
    assert losses.softened_kl(native.head(ours.rows.roll(1, 0)), truth, 1.0) > 1.0


def test_where_a_teacher_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(write_tiny_gguf(tmp_path / "tiny.gguf"))
    assert [backend_of(name, opened, maps=False) for name in BACKENDS] == ["native", "native", "torch"]
    assert backend_of("auto", opened, maps=True) == "torch"
    with pytest.raises(ValueError, match="unknown backend 'gpu'; use auto, native, torch"):
        backend_of("gpu", opened, maps=False)
    with pytest.raises(ValueError, match="cannot run on the native core: the maps of the loss attention are taken in torch"):
        backend_of("native", opened, maps=True)
    monkeypatch.setattr("headrace.core.reason", lambda: "it is not built")
    assert backend_of("auto", opened, maps=False) == "torch"
    with pytest.raises(ValueError, match="cannot run on the native core: it is not built; use backend torch"):
        backend_of("native", opened, maps=False)


def test_a_student_approaches_its_teacher(tmp_path: Path) -> None:
    """The first choice, which is what is accepted of a draft, comes nearer; from shuffled rows it does not."""
    generator = torch.Generator().manual_seed(2)
    texts = torch.randint(0, 6, (40, 16), generator=generator).tolist()
    learned, held = windows(texts[8:]), windows(texts[:8])
    before, after = {}, {}
    for kind in (DistillationLoss, Shuffled):
        hurt = tiny_model(dtype=torch.float32)
        noise = torch.Generator().manual_seed(9)
        for x in hurt.parameters():
            x.mul_(1 + 0.15 * torch.randn(x.shape, generator=noise))
        lesson = kind(TorchForward(tiny_model(dtype=torch.float32)), student(hurt), ["kl"], 2.0, 0.5)
        before[kind] = lesson.judge(held)
        run = Run(lesson.tensors, tmp_path / kind.__name__, Budget(steps=40), 5e-3)
        run.train(lambda step, by=lesson: by.backward(batch_of(learned, step, 2, 0)))  # type: ignore[misc]
        after[kind] = lesson.judge(held)
    assert after[DistillationLoss].kl < 0.5 * before[DistillationLoss].kl
    assert after[DistillationLoss].same_choice > before[DistillationLoss].same_choice + 0.08
    assert after[Shuffled].same_choice < before[Shuffled].same_choice
