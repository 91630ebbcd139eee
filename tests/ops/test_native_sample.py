"""The native sampler against the torch one: the same tokens, on every instruction set, and the same noise bits."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.native.live import sample_params
from headrace.data.params import SamplingParams
from headrace.ops import keys, noise, sampling
from headrace.ops.logprobs import token_logprobs
from tests.ulps import rounded_once

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]
VECTORS = {
    0x00000000: 0x41B6FDA9,
    0x00000001: 0x41AE33B3,
    0x40000000: 0x3F9F79A2,
    0x80000000: 0x3EBBA795,
    0xFFFFFFFF: 0xC04851D5,
    0x6627E8D5: 0x3F2CC257,
}


def logits(vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, vocab).astype(np.float32)


def draw_both(z: np.ndarray, spec: sampling.RowSpec, isa: str, maxima: bool = False):
    """What torch and the native sampler make of one row: (RowResult, reports, error)."""
    expected = sampling.sample(torch.from_numpy(z)[None], [spec])[0]
    history = module.History(list(spec.tokens[: spec.prompt_len]))
    history.extend(list(spec.tokens[spec.prompt_len :]))
    best = None
    if maxima:
        best = np.empty(-(-len(z) // module.VOCAB_BLOCK), dtype=np.float32)
        assert module.block_maxima(z, best, isa)
    before = z.copy()
    reports, error = module.Sampler(len(z), isa).draw(
        z,
        sample_params(spec.params, spec.stop_ids),
        history,
        list(spec.keys),
        path=list(spec.path),
        logprobs=-1 if spec.params.logprobs is None else spec.params.logprobs,
        processed=spec.params.logprobs_mode == "processed",
        purpose=int(spec.purpose),
        maxima=best,
        mu=spec.mu,
    )
    assert np.array_equal(z, before, equal_nan=True)  # edited in place, and put back
    return expected, reports, error


def assert_same(expected: sampling.RowResult, reports, error: str) -> None:
    assert bool(error) == bool(expected.error), (error, expected.error)
    if error:
        return
    assert [r.id for r in reports] == expected.tokens
    if expected.mus:
        assert [r.mu for r in reports] == pytest.approx(expected.mus, abs=1e-5)
    for report, wanted in zip(reports, expected.logprobs, strict=False):
        assert report.rank == wanted.rank
        assert report.top_ids == wanted.top_ids
        assert rounded_once([report.logprob, *report.top_logprobs], [wanted.logprob, *wanted.top_logprobs])


def random_spec(rng: random.Random, vocab: int) -> sampling.RowSpec:
    """Any mixture of settings, most of them neutral in most rows."""

    def maybe(value, neutral, chance: float = 0.3):
        return value if rng.random() < chance else neutral

    some = [rng.randrange(vocab) for _ in range(12)]
    tokens = [rng.choice(some) for _ in range(rng.randrange(1, 30))]
    temperature = rng.choice([0.0, 0.3, 0.7, 1.0, 1.0, 1.7])
    filters = {
        "top_n_sigma": maybe(rng.choice([0.1, 1.0, 2.5]), 0.0),
        "top_k": maybe(rng.choice([1, 2, 7, 40, vocab, 3 * vocab]), 0),
        "top_p": maybe(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999]), 1.0, 0.5),
        "min_p": maybe(rng.choice([1e-6, 0.05, 0.5, 1.0]), 0.0),
        "typical_p": maybe(rng.choice([0.05, 0.5, 0.95]), 1.0),
        "xtc_probability": maybe(rng.choice([0.5, 1.0]), 0.0),
        "xtc_threshold": rng.choice([0.0, 0.01, 0.1, 0.3]),
    }
    if temperature and rng.random() < 0.15:
        filters = {"mirostat_tau": rng.choice([0.5, 3.0, 8.0]), "mirostat_eta": 0.3}
    params = SamplingParams(
        temperature=temperature,
        **filters,
        dry_multiplier=maybe(rng.uniform(0.1, 3), 0.0),
        dry_base=rng.choice([1.0, 1.75, 4.0]),
        dry_allowed_length=rng.choice([1, 2, 3]),
        dry_breakers=maybe(tuple(some[7:9]), ()),
        dry_range=maybe(rng.randrange(1, 20), 0),
        repetition_penalty=maybe(rng.choice([0.8, 1.3]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        no_repeat_ngram=maybe(rng.randrange(1, 4), 0),
        logit_bias=maybe({t: rng.uniform(-5, 5) for t in some[:3]}, None),
        bad_words=maybe(((some[0],), (tokens[-1], some[1]), (some[2], some[3])), ()),
        allowed_token_ids=maybe(tuple(some[4:]), None, 0.15),
        min_tokens=maybe(10, 0),
        logprobs=maybe(rng.choice([0, 3, 20]), None),
        logprobs_mode=rng.choice(["raw", "masked", "processed"]),
        max_tokens=None,
    )
    return sampling.RowSpec(
        params=params,
        keys=[keys.key(rng.randrange(2**64), child) for child in range(rng.choice([1, 1, 3]))],
        tokens=tokens,
        prompt_len=rng.randrange(len(tokens) + 1),
        path=[rng.choice(some) for _ in range(rng.choice([0, 0, 3]))],
        stop_ids=some[5:7],
        mu=maybe(rng.uniform(-1, 12), None),
    )


def test_published_noise_vectors(isa):
    words = np.array(list(VECTORS), dtype=np.uint32)
    out = np.empty(len(words), dtype=np.float32)
    module.gumbel_words(words, out, isa)
    assert out.view(np.uint32).tolist() == list(VECTORS.values())


def test_noise_has_the_bits_of_the_reference(isa):
    rng = np.random.default_rng(1)
    words = rng.integers(0, 2**32, 100_003, dtype=np.uint64).astype(np.uint32)
    words[:4] = 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1
    out = np.empty(len(words), dtype=np.float32)
    module.gumbel_words(words, out, isa)
    assert np.array_equal(out.view(np.uint32), noise.reference_gumbel(words).view(np.uint32))


@pytest.mark.parametrize("vocab", [1, 3, 16, 63, 64, 65, 1000, 49_152])
def test_noise_of_a_row_and_of_chosen_ids(isa, vocab):
    key = keys.key(vocab, 3)
    for position, purpose in [(0, 0), (77, 2), (2**31, 4)]:
        wanted = noise.reference_gumbel_at(key, position, vocab, purpose)
        row = np.empty(vocab, dtype=np.float32)
        module.gumbel_row(key, position, row, purpose, isa)
        assert np.array_equal(row.view(np.uint32), wanted.view(np.uint32))
        ids = np.random.default_rng(0).integers(0, vocab, 37).astype(np.int32)
        some = np.empty(len(ids), dtype=np.float32)
        module.gumbel_ids(key, position, ids, some, purpose, isa)
        assert np.array_equal(some, wanted[ids])


@pytest.mark.parametrize("cases", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab", [1, 2, 37, 64, 65, 130, 1000])
def test_same_tokens_as_torch_for_random_settings(isa, vocab, cases):
    rng = random.Random(vocab)
    for case in range(cases):
        spec = random_spec(rng, vocab)
        z = logits(vocab, case, rng.choice([0.0, 0.5, 3.0, 12.0]))
        if rng.random() < 0.3:
            z = np.round(z)  # many ties
        assert_same(*draw_both(z, spec, isa, maxima=rng.random() < 0.5))


@pytest.mark.parametrize("vocab", [49_152, pytest.param(151_936, marks=pytest.mark.slow)])
def test_same_tokens_as_torch_on_large_vocabularies(isa, vocab):
    settings = [
        {},
        {"temperature": 0.0, "logprobs": 5},
        {"top_k": 50},
        {"top_k": 5000, "temperature": 1.5},
        {"temperature": 0.7, "top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.01},
        {"typical_p": 0.9, "top_p": 0.9, "logprobs": 2, "logprobs_mode": "processed"},
        {"min_p": 0.1, "repetition_penalty": 1.2},
        {"top_p": 0.999, "logprobs": 8, "logprobs_mode": "processed"},
        {"top_n_sigma": 1.0, "logprobs": 3, "logprobs_mode": "processed"},
        {"xtc_probability": 0.5, "xtc_threshold": 0.001, "logprobs": 3, "logprobs_mode": "processed"},
        {"mirostat_tau": 4.0, "dry_multiplier": 1.0},
    ]
    for case, setting in enumerate(settings):
        for spread in (0.3, 3.0):
            spec = sampling.RowSpec(SamplingParams(**setting), [keys.key(case, 0), keys.key(case, 1)], [5, 9, 70], 1)
            assert_same(*draw_both(logits(vocab, case, spread), spec, isa, maxima=case % 2 == 0))


def test_all_equal_logits_keep_the_lowest_ids(isa):
    z = np.zeros(1000, dtype=np.float32)
    for setting in ({"temperature": 0.0}, {"top_k": 10}, {"top_p": 0.01}, {"typical_p": 0.01}):
        spec = sampling.RowSpec(SamplingParams(**setting), [keys.key(s) for s in range(50)], [0], 1)
        expected, reports, error = draw_both(z, spec, isa)
        assert_same(expected, reports, error)
        assert max(report.id for report in reports) < 10


def test_the_bound_on_noise_changes_nothing(isa):
    """Most noise is never drawn; the token is that of all logits plus all noise."""
    vocab = 4096
    row = np.empty(vocab, dtype=np.float32)
    sampler, params = module.Sampler(vocab, isa), module.SampleParams()
    for seed in range(40):
        z = logits(vocab, seed, (0.1, 1.0, 4.0, 15.0)[seed % 4])
        history = module.History([1] * seed)
        reports, error = sampler.draw(z, params, history, [keys.key(seed)])
        module.gumbel_row(keys.key(seed), seed, row, 0, isa)
        assert not error
        assert reports[0].id == int(np.argmax(z + row))


def test_one_key_off_is_another_stream(isa):
    """The control of the equalities above: with the wrong child key they do not hold."""
    z = logits(1000, 0, 1.0)
    spec = sampling.RowSpec(SamplingParams(), [keys.key(3, child) for child in range(20)], [1], 1)
    expected, _, _ = draw_both(z, spec, isa)
    wrong, _, _ = draw_both(z, replace(spec, keys=[keys.key(3, child + 1) for child in range(20)]), isa)
    assert expected.tokens != wrong.tokens
    assert expected.tokens[1:] == wrong.tokens[:-1]


def test_a_grammar_mask_is_a_list_of_allowed_ids(isa):
    vocab = 1000
    for seed in range(20):
        rng = np.random.default_rng(seed)
        allowed = sorted(rng.choice(vocab, 1 + seed * 7, replace=False).tolist())
        bits = np.zeros(vocab, dtype=np.uint8)
        bits[allowed] = 1
        mask = np.packbits(np.pad(bits, (0, -vocab % 32)), bitorder="little").view(np.uint32)
        params = SamplingParams(top_p=0.8, logit_bias={allowed[0]: 2.0, 3: 1.0}, repetition_penalty=1.2)
        z, key, history = logits(vocab, seed), [keys.key(seed)], module.History([3, allowed[0]])
        sampler = module.Sampler(vocab, isa)
        by_list, _ = sampler.draw(z, sample_params(params.replace(allowed_token_ids=tuple(allowed))), history, key)
        by_mask, error = sampler.draw(z, sample_params(params), history, key, mask=mask)
        assert not error
        assert by_mask[0].id == by_list[0].id
        assert by_mask[0].id in allowed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda z: z.__setitem__(7, math.nan), "largest is nan"),
        (lambda z: z.__setitem__(70, math.inf), "largest is inf"),
        (lambda z: z.fill(-math.inf), "largest is -inf"),
    ],
)
def test_broken_logits_are_an_error_of_their_row(isa, change, words):
    z = logits(100, 0)
    change(z)
    spec = sampling.RowSpec(SamplingParams(), [keys.key(0)], [1], 1)
    expected, _, error = draw_both(z, spec, isa)
    assert "logits are broken" in error
    assert words in error
    assert words in expected.error


def test_no_allowed_token_and_invalid_ids_are_errors(isa):
    z = logits(100, 0)
    empty = SamplingParams(allowed_token_ids=(3,), bad_words=((3,),))
    expected, _, error = draw_both(z, sampling.RowSpec(empty, [keys.key(0)], [1], 1), isa)
    assert "no token can be drawn" in error
    assert "no token can be drawn" in expected.error
    params = module.SampleParams()
    params.logit_bias = [(100, 1.0)]
    _, error = module.Sampler(100, isa).draw(z, params, module.History([1]), [keys.key(0)])
    assert "100 is outside the vocabulary of 100" in error


def test_top_and_score_are_log_softmax(isa):
    vocab = 3000
    sampler = module.Sampler(vocab, isa)
    z = np.stack([logits(vocab, seed) for seed in range(4)])
    wanted = torch.from_numpy(z).double().log_softmax(-1)
    for row, values in zip(z, wanted, strict=True):
        report, error = sampler.top(row, 16)
        order = np.argsort(-row, kind="stable")[:16]
        assert not error
        assert report.top_ids == order.tolist()
        assert rounded_once(report.top_logprobs, values[order.copy()].tolist())
    tokens = np.array([5, 2999, 64, 0], dtype=np.int32)
    reports, error = sampler.score(z, tokens, 3)
    assert not error
    for report, entry in zip(reports, token_logprobs(torch.from_numpy(z), torch.from_numpy(tokens).long(), 3), strict=True):
        assert (report.id, report.rank, report.top_ids) == (entry.token, entry.rank, entry.top_ids)
        assert rounded_once([report.logprob], [entry.logprob])


def test_top_sees_biases_and_bans(isa):
    z = logits(200, 1)
    params = SamplingParams(logit_bias={7: 30.0}, bad_words=((int(z.argmax()),),))
    report, _ = module.Sampler(200, isa).top(z, 2, sample_params(params), module.History([1]))
    assert report.top_ids[0] == 7
    assert int(z.argmax()) not in report.top_ids


def reference_walk(z: np.ndarray, params: SamplingParams, tokens: list[int], draft: list[int], parents: list[int], key):
    """Draw at each node with the torch sampler, and follow the child that was drawn."""
    node, path, drawn, mu = -1, [], [], None
    while True:
        spec = sampling.RowSpec(params, [key], tokens, 2, drawn, mu=mu)
        (result,) = sampling.sample(torch.from_numpy(z[node + 1])[None], [spec])
        (token,), mu = result.tokens, (result.mus or [None])[0]
        drawn = [*drawn, token]
        child = [i for i, parent in enumerate(parents) if parent == node and draft[i] == token]
        if not child:
            return path, drawn
        node = child[0]
        path.append(node)


WALKS = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.9, "presence_penalty": 1.0, "no_repeat_ngram": 2},
    {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    {"xtc_probability": 0.5, "top_n_sigma": 1.5},
    {"mirostat_tau": 1.0, "mirostat_eta": 0.8},
]


@pytest.mark.parametrize("trees", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", WALKS)
def test_verification_walks_the_tree_as_single_draws_do(isa, setting, trees):
    vocab, lengths = 6, set()
    params = SamplingParams(**setting)
    for seed in range(trees):
        rng = random.Random(seed)
        nodes = rng.randrange(0, 20)
        parents = [rng.randrange(-1, i) for i in range(nodes)]
        draft = [rng.randrange(vocab) for _ in range(nodes)]
        z = np.stack([logits(vocab, 100 * seed + i, 1.0) for i in range(nodes + 1)])
        history = module.History([1, 2])
        history.extend([3])
        path, reports, error = module.Sampler(vocab, isa).verify(
            z, sample_params(params), history, keys.key(seed), draft, parents, logprobs=0
        )
        assert not error
        wanted_path, wanted = reference_walk(z, params, [1, 2, 3], draft, parents, keys.key(seed))
        assert path == wanted_path
        assert [report.id for report in reports] == wanted
        lengths.add(len(path))
    assert len(lengths) > 2  # some walks stop at once, others go on


def test_verification_ends_before_a_node_behind_which_nothing_can_be_drawn(isa):
    z = np.zeros((3, 8), np.float32)
    z[0, 5] = z[1, 6] = 9.0
    z[2] = math.nan
    asks = (sample_params(SamplingParams(temperature=0.0)), module.History([1]), keys.key(0))
    for rows, path, drawn in ((z, [0], [5, 6]), (z[[0, 2, 2]], [], [5])):
        found, reports, error = module.Sampler(8, isa).verify(rows.copy(), *asks, [5, 6], [-1, 0], logprobs=0)
        assert (found, [report.id for report in reports], error) == (path, drawn, "")
    assert "logits are broken" in module.Sampler(8, isa).verify(z[[2, 2, 2]].copy(), *asks, [5, 6], [-1, 0], logprobs=0)[2]


def test_bad_shapes_are_refused():
    sampler, params, history = module.Sampler(100), module.SampleParams(), module.History([1])
    with pytest.raises(ValueError, match="one value per token"):
        sampler.draw(logits(99, 0), params, history, [(0, 0)])
    with pytest.raises(ValueError, match="must come before"):
        sampler.verify(np.zeros((3, 100), np.float32), params, history, (0, 0), [1, 2], [1, 0])
    with pytest.raises(ValueError, match="unknown instruction set"):
        module.Sampler(100, "avx1024")
