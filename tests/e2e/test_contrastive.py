"""Contrastive decoding and contrastive search in the engine equal their references, which know no cache, batch or loop."""

import random
from collections.abc import Callable

import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import HIDDEN, TARGET, KVGroup
from headrace.data.types import ALL
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.runner.runner import Runner
from tests.contrast_engines import engine_of
from tests.contrast_reference import contrastive_decoding, contrastive_search
from tests.drafters import Replaying
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_model, tokens_of

DECODING = SamplingParams(temperature=0.0, contrastive_beta=0.8, contrastive_alpha=0.1, max_tokens=10)
SEARCH = SamplingParams(penalty_alpha=0.6, top_k=4, max_tokens=8)


@pytest.fixture(scope="module")
def expert() -> Model:
    return tiny_model()


@pytest.fixture(scope="module")
def amateur() -> Model:
    return tiny_model(tiny_config(num_layers=1, hidden_size=16), seed=5)


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB), k=length) for length in lengths]


def outputs(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    return [tokens_of(request)[0] for request in requests]


# -- contrastive decoding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("budget", [64, 7])
def test_contrastive_decoding_equals_the_probability_form(
    expert: Model, amateur: Model, temperature: float, budget: int
) -> None:
    params = DECODING.replace(temperature=temperature, seed=3)
    jobs = [(prompt, params) for prompt in prompts(1, 1, 5, 19)]
    jobs.append((jobs[2][0], SamplingParams(temperature=temperature, seed=3, max_tokens=10)))
    expected = [contrastive_decoding(expert, amateur, prompt, params) for prompt, _ in jobs[:3]]
    plain = run_alone(expert, *jobs[3])
    assert outputs(engine_of(expert, amateur, budget=budget), jobs) == [*expected, plain]
    assert expected[2] != plain


def test_neutral_settings_give_the_text_of_the_expert(expert: Model, amateur: Model) -> None:
    """beta = 0, alpha = 1, or an amateur that is the expert: the expert's greedy text."""
    (prompt,) = prompts(2, 12)
    plain = run_alone(expert, prompt, DECODING.replace(contrastive_beta=None))
    engine = engine_of(expert, amateur)
    for params in (DECODING.replace(contrastive_beta=0.0), DECODING.replace(contrastive_alpha=1.0)):
        assert outputs(engine, [(prompt, params)]) == [plain]
    assert outputs(engine_of(expert, expert), [(prompt, DECODING)]) == [plain]
    assert outputs(engine, [(prompt, DECODING)]) != [plain]


def test_contrast_without_its_mask_changes_the_text(expert: Model, amateur: Model) -> None:
    (prompt,) = prompts(3, 12)
    strong = DECODING.replace(contrastive_alpha=0.5, temperature=1.5, seed=1)
    unmasked = outputs(engine_of(expert, amateur), [(prompt, strong.replace(contrastive_alpha=0.0))])[0]
    assert unmasked == contrastive_decoding(expert, amateur, prompt, strong.replace(contrastive_alpha=0.0))
    assert unmasked != contrastive_decoding(expert, amateur, prompt, strong)


LIMITS = {
    "a list": {"allowed_token_ids": (3, 11, 40, 41, 60, 88)},
    "a list and words": {"allowed_token_ids": (3, 11, 40, 41, 60, 88), "bad_words": ((11,), (40, 60))},
    "no repetition": {"no_repeat_ngram": 1},
}


@pytest.mark.parametrize("kind", LIMITS)
def test_plausible_tokens_are_chosen_among_permitted_tokens(expert: Model, amateur: Model, kind: str) -> None:
    """None of the tokens that are plausible in the whole vocabulary need be among them."""
    jobs = [(prompt, DECODING.replace(contrastive_alpha=0.5, **LIMITS[kind])) for prompt in prompts(9, 3, 14)]
    expected = [contrastive_decoding(expert, amateur, *job) for job in jobs]
    assert outputs(engine_of(expert, amateur), jobs) == expected


def test_plausibility_over_the_full_vocabulary_leaves_no_token(
    expert: Model, amateur: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the best of the whole vocabulary sets the bar."""
    monkeypatch.setattr("headrace.backends.eager.step.permitted_rows", lambda fed, logits: logits)
    engine = engine_of(expert, amateur)
    request = engine.add(prompts(9, 3)[0], DECODING.replace(contrastive_alpha=0.5, **LIMITS["a list"]))
    while engine.busy:
        engine.step()
    assert request.error is not None


def test_a_block_without_the_amateurs_keys_is_not_reused(expert: Model, amateur: Model) -> None:
    """A plain request publishes the prompt first; the contrastive one must not read K and V that nobody computed."""
    (prompt,) = prompts(4, 33)
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    engine = engine_of(expert, amateur)
    outputs(engine, [(prompt, plain)])
    engine.blocks.begin()
    engine.blocks.end()
    first = engine.add(prompt, DECODING)
    finish(engine)
    again, searched = engine.add(prompt, DECODING), engine.add(prompt, SEARCH)
    finish(engine)
    assert (first.metrics.cached_tokens, again.metrics.cached_tokens, searched.metrics.cached_tokens) == (0, 32, 0)
    assert tokens_of(first) == tokens_of(again) == [contrastive_decoding(expert, amateur, prompt, DECODING)]


def test_a_hit_on_any_block_would_be_caught(expert: Model, amateur: Model) -> None:
    """Negative control: blocks that lack the amateur's K and V are matched all the same."""
    (prompt,) = prompts(4, 33)
    engine = engine_of(expert, amateur)
    outputs(engine, [(prompt, SamplingParams(temperature=0.0, max_tokens=3))])
    match = engine.blocks.match
    engine.blocks.match = lambda seq, need=None, most=ALL: match(seq, 1, most)  # type: ignore[method-assign]
    assert outputs(engine, [(prompt, DECODING)]) != [contrastive_decoding(expert, amateur, prompt, DECODING)]


# -- contrastive search ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("penalty", [0.2, 0.6])
def test_contrastive_search_equals_the_reference(expert: Model, amateur: Model, penalty: float, budget: int) -> None:
    jobs = [(prompt, SEARCH.replace(penalty_alpha=penalty, top_k=k)) for k, prompt in enumerate(prompts(5, 1, 6, 21), 2)]
    expected = [contrastive_search(expert, prompt, params) for prompt, params in jobs]
    engine = engine_of(expert, amateur, budget=budget)
    assert outputs(engine, jobs) == expected
    assert outputs(engine, jobs) == expected  # from the prefix cache


@pytest.mark.parametrize("architecture", ["gpt2", "gemma3_text", "qwen3"])
def test_contrastive_search_of_other_architectures(architecture: str, amateur: Model) -> None:
    model = tiny_model(tiny_config(architecture))
    (prompt,) = prompts(6, 9)
    assert outputs(engine_of(model, amateur), [(prompt, SEARCH)]) == [contrastive_search(model, prompt, SEARCH)]


def test_contrast_from_the_last_prompt_token_only_is_caught(expert: Model) -> None:
    """Negative control: what many implementations do after a prefix hit."""
    jobs = [(prompt, SEARCH) for prompt in prompts(5, 12, 18, 25)]
    whole = [contrastive_search(expert, *job) for job in jobs]
    assert whole != [contrastive_search(expert, *job, first=len(job[0]) - 1) for job in jobs]


def mixed(seed: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    shared = rng.choices(range(VOCAB), k=13)
    jobs = []
    for number in range(7):
        prompt = (shared if rng.random() < 0.5 else []) + rng.choices(range(VOCAB), k=rng.choice([1, 4, 11]))
        plain = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=number, max_tokens=9)
        contrasted = DECODING.replace(temperature=rng.choice([0.0, 0.8]), seed=number)
        jobs.append((prompt, [SEARCH, contrasted, plain][number % 3]))
    return jobs


def reference(expert: Model, amateur: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    if params.penalty_alpha:
        return contrastive_search(expert, prompt, params)
    if params.contrastive_beta is not None:
        return contrastive_decoding(expert, amateur, prompt, params)
    return run_alone(expert, prompt, params)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_on_a_tiny_pool_with_preemption(expert: Model, amateur: Model, seed: int) -> None:
    jobs = mixed(seed)
    engine = engine_of(expert, amateur, blocks=16, budget=[64, 12][seed % 2])
    assert outputs(engine, jobs) == [reference(expert, amateur, *job) for job in jobs]
    assert engine.scheduler.preemptions > 0
    assert engine.blocks.used == 0


def no_copies_of_hidden(engine: Engine) -> None:
    engine.executor.runner.kept[HIDDEN].rearrange = lambda plan: None  # type: ignore[attr-defined]


def test_unmoved_hidden_states_change_the_output(expert: Model, amateur: Model) -> None:
    jobs = [(prompt, SEARCH) for prompt in prompts(5, 12, 18, 25)]
    engine = engine_of(expert, amateur)
    no_copies_of_hidden(engine)
    assert outputs(engine, jobs) != [contrastive_search(expert, *job) for job in jobs]


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_unsupported_combinations_are_refused(expert: Model) -> None:
    pool = KVPool(expert.config, 32, 4, torch.float64)
    config = EngineConfig(SchedulerConfig(max_num_batched_tokens=8, max_model_len=64), CacheConfig(32, 4))
    alone = Engine(
        InProcess(Runner(EagerProgram(expert, pool))), config, vocab_size=VOCAB, groups=(TARGET, KVGroup(HIDDEN, "hidden"))
    )
    with pytest.raises(AdmissionError, match="needs an amateur; open the model with amateur=MODEL"):
        alone.add([1, 2], DECODING)
    with pytest.raises(AdmissionError, match="lower top_k"):
        alone.add([1, 2], SEARCH.replace(top_k=8))
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: SEARCH.replace(top_k=0), "needs top_k between 2 and"),
        (lambda: SEARCH.replace(temperature=0.7), "leave out temperature"),
        (lambda: SEARCH.replace(repetition_penalty=1.2, min_p=0.1), "leave out min_p, repetition_penalty"),
        (lambda: SEARCH.replace(n=2), "has one answer"),
        (lambda: DECODING.replace(contrastive_alpha=1.5), "contrastive_alpha must be between"),
        (lambda: DECODING.replace(prompt_logprobs=0), "leave contrastive_beta or prompt_logprobs out"),
    ]
    for make, message in refused:
        with pytest.raises(ParamError, match=message):
            make()


def test_min_tokens_keeps_the_end_token_out_of_the_candidates(expert: Model, amateur: Model) -> None:
    (prompt,) = prompts(7, 8)
    text = contrastive_search(expert, prompt, SEARCH)
    params = SEARCH.replace(stop_token_ids=(text[2],))
    engine = engine_of(expert, amateur)
    assert outputs(engine, [(prompt, params)]) == [text[:3]]
    for least in range(7):
        least_of_it = params.replace(min_tokens=least, max_tokens=12)
        found = outputs(engine, [(prompt, least_of_it)])[0]
        assert found == contrastive_search(expert, prompt, least_of_it)
        assert text[2] not in found[:least]
        assert (found == text[:3]) == (least <= 2)  # the very next token may be the end


# -- with speculation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_are_verified_against_the_contrast(expert: Model, amateur: Model, temperature: float) -> None:
    """The amateur is fed the draft's nodes too; its K and V of the accepted path stay right."""
    params = DECODING.replace(temperature=temperature, seed=2, max_tokens=12)
    jobs = [(prompt, params) for prompt in prompts(8, 6, 17)]
    expected = [contrastive_decoding(expert, amateur, *job) for job in jobs]
    answers = {(tuple(prompt), 2, 0): text for (prompt, _), text in zip(jobs, expected, strict=True)}
    engine = engine_of(expert, amateur)
    engine.speculation = Speculation([Replaying(answers, VOCAB)], 256, 5)
    requests = [engine.add(*job) for job in jobs]
    finish(engine)
    assert [tokens_of(request)[0] for request in requests] == expected
    assert all(request.metrics.accepted > 0 for request in requests)
