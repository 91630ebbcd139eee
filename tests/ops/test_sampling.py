"""The whole way from logits to tokens: order, greedy, noise, masks, errors, log-probabilities, independence of rows."""

import math

import numpy as np
import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.ops import filters
from headrace.ops.keys import Purpose, key
from headrace.ops.logprobs import token_logprobs
from headrace.ops.noise import REACH, gumbel_at, reference_gumbel_at
from headrace.ops.penalties import TokenCounts
from headrace.ops.sampling import RowSpec, draw, process, sample
from tests.ops.sampling_reference import edited, filtered
from tests.ulps import rounded_once

NEVER = float("-inf")
VOCAB = 150


def spec(prompt=(0,), output=(), n=1, seed=0, stop_ids=(), counts=None, path=(), **changes) -> RowSpec:
    keys = [key(seed, child) for child in range(n)]
    tokens = [*prompt, *output]
    return RowSpec(SamplingParams(**changes), keys, tokens, len(prompt), path=path, stop_ids=stop_ids, counts=counts)


def random_logits(rng, rows=1, vocab=VOCAB, spread=3.0) -> torch.Tensor:
    return torch.from_numpy(rng.normal(0, spread, (rows, vocab)).astype(np.float32))


def random_spec(rng, vocab=VOCAB) -> RowSpec:
    """Parameters of every kind, each stage in about every third row."""

    def maybe(value):
        return value if rng.random() < 0.33 else None

    prompt, output = (rng.integers(0, min(vocab, 12), rng.integers(1, 20)).tolist() for _ in range(2))
    changes = {
        "temperature": maybe(0.0) if rng.random() < 0.5 else maybe(float(rng.uniform(0.2, 3))),
        "top_k": maybe(int(rng.integers(1, 60))),
        "top_p": maybe(float(rng.uniform(0.1, 0.99))),
        "typical_p": maybe(float(rng.uniform(0.1, 0.99))),
        "min_p": maybe(float(rng.uniform(0.01, 0.5))),
        "repetition_penalty": maybe(float(rng.uniform(0.8, 1.5))),
        "frequency_penalty": maybe(float(rng.uniform(-1, 1))),
        "presence_penalty": maybe(float(rng.uniform(-1, 1))),
        "no_repeat_ngram": maybe(int(rng.integers(1, 4))),
        "logit_bias": maybe({int(t): float(rng.uniform(-5, 5)) for t in rng.integers(0, vocab, 3)}),
        "bad_words": maybe(((int(output[-1]), 5), (7,))),
        "allowed_token_ids": maybe(tuple(rng.integers(0, vocab, 40).tolist())),
        "min_tokens": maybe(int(rng.integers(0, 16))),
        "logprobs": maybe(int(rng.integers(0, 6))),
        "logprobs_mode": maybe("processed"),
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return spec(prompt, output, n=int(rng.integers(1, 4)), seed=int(rng.integers(0, 2**63)), stop_ids=(2, 3), **changes)


def tokens_of(logits, *rows) -> list[list[int]]:
    results = sample(logits, rows)
    assert [result.error for result in results] == [""] * len(rows)
    return [result.tokens for result in results]


# --- the draw ---------------------------------------------------------------------------------------------------------


def test_W12_temperature_zero_is_the_argmax_without_nan():
    z = random_logits(np.random.default_rng(0), 5)
    z[0, 3] = NEVER
    greedy = sample(z, [spec(temperature=0.0, logprobs=2) for _ in range(5)])
    assert [result.tokens for result in greedy] == [[t] for t in z.argmax(-1).tolist()]
    assert all(math.isfinite(entry.logprob) for result in greedy for entry in result.logprobs)
    assert tokens_of(z, *[spec(temperature=0.009) for _ in range(5)]) == [result.tokens for result in greedy]


def test_greedy_and_draws_take_the_lowest_id_on_ties():
    z = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0]]).repeat(1, 3000)
    assert tokens_of(z, spec(temperature=0.0)) == [[1]]
    noise = gumbel_at(torch.tensor([key(0, 0)]), torch.tensor([0]), 5)
    tied = torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0]]) - noise  # logit + noise is a tie of 1, 3 and 4
    tied = tied + (torch.tensor([[1.0, 2.0, 0.0, 2.0, 2.0]]) - (tied + noise))
    sums = tied + noise
    assert sums[0, 1] == sums[0, 3] == sums[0, 4]
    assert draw(tied, torch.tensor([key(0, 0)]), torch.tensor([0])).tolist() == [1]


def test_greedy_does_not_change_with_filters_or_positive_temperature():
    rng = np.random.default_rng(1)
    z = random_logits(rng, 20)
    best = [[t] for t in z.argmax(-1).tolist()]
    assert tokens_of(z, *[spec(temperature=0.0, top_k=3, top_p=0.2, min_p=0.9, typical_p=0.1) for _ in best]) == best
    assert tokens_of(z, *[spec(top_k=1, temperature=5.0) for _ in best]) == best
    assert tokens_of(z, *[spec(top_p=1e-6) for _ in best]) == best


def test_greedy_is_the_argmax_of_the_penalised_logits():
    z = torch.tensor([[3.0, 2.9, 0.0]])
    assert tokens_of(z, spec([0], temperature=0.0)) == [[0]]
    assert tokens_of(z, spec([0], temperature=0.0, repetition_penalty=1.5)) == [[1]]
    assert tokens_of(z, spec([1], [0], temperature=0.0, presence_penalty=0.5)) == [[1]]
    assert tokens_of(z, spec(temperature=0.0, logit_bias={2: 4.0})) == [[2]]


@pytest.mark.parametrize("vocab", [3, 150, 5001])
def test_every_draw_is_the_argmax_of_processed_logits_plus_all_of_the_noise(vocab):
    """Against the numpy noise for the whole vocabulary: what is left out for speed cannot win."""
    rng = np.random.default_rng(vocab)
    for spread in (0.5, 3.0, 15.0):
        z = random_logits(rng, 4, vocab, spread)
        rows = [
            spec(range(min(vocab, 9)), n=3, seed=1),
            spec(n=3, seed=2**64 - 1, temperature=0.6, top_p=0.8),
            spec(n=3, seed=5, temperature=0.02),
            spec(n=3, seed=6, temperature=1.5, min_p=0.02, top_k=500),
        ]
        processed = process(z, rows).numpy()
        for row, logits, drawn in zip(rows, processed, tokens_of(z, *rows), strict=True):
            noise = [reference_gumbel_at(k, row.position, vocab) for k in row.keys]
            assert drawn == [int(np.argmax(logits + g)) for g in noise]


def test_the_reachable_filter_is_exact_at_its_bound():
    """A token can win from 26 below: the best draws the least noise, it the most. The shortcut must not drop it."""
    gap = 26.0
    z = torch.tensor([[0.0, -gap, -REACH - 0.01]])
    assert (filters.reachable(z)[0] > NEVER).tolist() == [True, True, False]
    large = torch.tensor([[3e5, 3e5 - 26.03]])  # here float32 rounds what is added, so the edge is wider
    assert (filters.reachable(large)[0] > NEVER).all()


def test_child_position_path_and_purpose_choose_the_noise():
    z = torch.zeros(1, VOCAB)
    together = tokens_of(z, spec(n=4))[0]
    alone = [tokens_of(z, RowSpec(SamplingParams(), [key(0, child)], [0], 1))[0][0] for child in range(4)]
    assert together == alone
    assert len(set(together)) == 4
    assert tokens_of(z, spec([0, 1, 2])) == tokens_of(z, spec([0], [1, 2])) == tokens_of(z, spec([0], path=(1, 2)))
    assert tokens_of(z, spec([0, 1, 2])) != tokens_of(z, spec([0, 1]))
    draft = RowSpec(SamplingParams(), [key(0, 0)], [0], 1, purpose=Purpose.DRAFT)
    assert tokens_of(z, draft) != tokens_of(z, spec())


# --- the processing ---------------------------------------------------------------------------------------------------


def test_B1_temperature_comes_before_top_p():
    """At p = 0.6 the nucleus of .5/.3/.2 is two tokens; sharpened to T = 0.5 (.66/.24/.1) it is one."""
    z = torch.tensor([[0.5, 0.3, 0.2]]).log()
    allowed = (process(z, [spec(temperature=0.5, top_p=0.6)]) > NEVER)[0].tolist()
    other_order = filters.temperature(filters.top_p(z, 0.6), 0.5)
    assert allowed == [True, False, False]
    assert (other_order > NEVER)[0].tolist() == [True, True, False]


def test_B1_the_order_of_the_other_stages():
    """Pairs of stages that do not commute, each in the documented order."""
    z = torch.tensor([[2.0, 1.9, 1.0, 0.5]])

    def kept_tokens(**changes):
        return (process(z, [spec([0], **changes)]) > NEVER)[0].tolist()

    # penalties before top-k: the penalised best falls out
    assert kept_tokens(top_k=2, repetition_penalty=2.5) == [False, True, True, False]
    # bias before the repetition penalty: 0 becomes positive first, and is then divided
    assert process(z, [spec([3], logit_bias={3: 0.5}, repetition_penalty=2.0)])[0, 3] == 0.5
    # repetition before presence: 2 / 2 - 1, not (2 - 1) / 2
    assert process(z, [spec([1], [0], repetition_penalty=2.0, presence_penalty=1.0)])[0, 0] == 0.0
    # top-k before top-p: of .50/.45/... the two kept are renormalised, so the best alone reaches .52
    assert kept_tokens(top_k=2, top_p=0.52) == [True, False, False, False]
    assert kept_tokens(top_p=0.52) == [True, True, False, False]
    # a masked token takes no place among the k
    assert kept_tokens(top_k=2, bad_words=((0,),)) == [False, True, True, False]


def test_neutral_parameters_leave_every_bit():
    z = random_logits(np.random.default_rng(2), 1, 5000)
    z[0, 1], z[0, 2] = -0.0, NEVER
    neutral = spec([1, 2, 3], [4, 5], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, min_tokens=0)
    assert torch.equal(process(z, [neutral])[0].view(torch.int32), z[0].view(torch.int32))
    off = spec([1, 2, 3], [4, 5], top_k=5000)
    assert torch.equal(process(z, [off])[0].view(torch.int32), z[0].view(torch.int32))


@pytest.mark.parametrize("seed", range(4))
def test_processing_equals_the_plain_definition(seed):
    """All stages in random combinations, against numpy in float64."""
    rng = np.random.default_rng(seed)
    for _ in range(40):
        row = random_spec(rng)
        z = random_logits(rng)
        prompt, output = list(row.tokens[: row.prompt_len]), list(row.tokens[row.prompt_len :])
        expected = edited(z[0].numpy(), row.params, prompt, output, row.stop_ids)
        if not row.params.greedy and np.isfinite(expected.max()):
            expected = filtered(expected, row.params)
        ours = process(z, [row])[0].numpy()
        assert np.array_equal(ours > NEVER, expected > NEVER)
        possible = ours > NEVER
        assert np.allclose(ours[possible], expected[possible], rtol=1e-5, atol=1e-5)


def test_min_tokens_masks_stop_ids_until_then():
    z = torch.tensor([[0.0, 9.0, 1.0]])
    assert tokens_of(z, spec([0], [2], temperature=0.0, min_tokens=2, stop_ids=[1])) == [[2]]
    assert tokens_of(z, spec([0], [2, 2], temperature=0.0, min_tokens=2, stop_ids=[1])) == [[1]]
    assert tokens_of(z, spec([0], [2], path=(2,), temperature=0.0, min_tokens=2, stop_ids=[1])) == [[1]]


def test_bad_words_of_several_tokens_and_ngrams_span_prompt_output_and_path():
    z = torch.tensor([[0.0, 9.0, 1.0]])
    assert tokens_of(z, spec([0, 2], [0], temperature=0.0, bad_words=((2, 0, 1),))) == [[2]]
    assert tokens_of(z, spec([0, 2], [], path=(0,), temperature=0.0, bad_words=((2, 0, 1),))) == [[2]]
    assert tokens_of(z, spec([0, 0], [0], temperature=0.0, bad_words=((2, 0, 1),))) == [[1]]
    assert tokens_of(z, spec([2, 0, 1], [2], path=(0,), temperature=0.0, no_repeat_ngram=3)) == [[2]]
    assert tokens_of(z, spec([2, 0, 1], [2, 2], temperature=0.0, no_repeat_ngram=3)) == [[1]]


def test_incremental_counts_equal_a_recount():
    rng = np.random.default_rng(3)
    z = random_logits(rng)
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.1, "temperature": 0.9}
    prompt, output, path = [1, 2], [3, 3, 4], [5, 3]
    anew = process(z, [spec(prompt, output, path=path, **changes)])
    for known in range(4):
        counts = TokenCounts(VOCAB, prompt, output[:known])
        assert torch.equal(process(z, [spec(prompt, output, path=path, counts=counts, **changes)]), anew)
        assert counts.length == known


# --- rows and errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "batches"),
    [(VOCAB, 4), (4000, 2), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((VOCAB, 12), (4000, 5)))],
)
def test_a_row_does_not_depend_on_the_others(vocab, batches):
    """Batches of everything at once, each row against itself alone: same tokens, same log-probabilities, same errors."""
    rng = np.random.default_rng(vocab)
    for _ in range(batches):
        rows = [random_spec(rng, vocab) for _ in range(12)]
        z = random_logits(rng, 12, vocab)
        z[int(rng.integers(0, 12)), 5] = math.nan
        assert sample(z, rows) == [sample(z[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        order = rng.permutation(12)
        assert [sample(z, rows)[i] for i in order] == sample(z[order], [rows[i] for i in order])


def test_the_number_of_threads_does_not_matter():
    """A long row's sums and maxima are split between threads; the bits must not show it."""
    z = random_logits(np.random.default_rng(14), 1, 200_000, 1.5).round(decimals=3)  # many ties
    rows = [spec(temperature=0.0), spec(n=4, logprobs=3), spec(n=4, top_p=0.7, logprobs=3, logprobs_mode="processed")]
    rows += [spec(n=4, typical_p=0.5), spec(n=4, top_k=3000, min_p=1e-4)]
    one = sample(z.expand(len(rows), -1), rows), process(z, rows[2:3])
    torch.set_num_threads(4)
    four = sample(z.expand(len(rows), -1), rows), process(z, rows[2:3])
    assert one[0] == four[0]
    assert one[0][0].tokens == [int(np.argmax(z[0].numpy()))]  # numpy takes the first of equals
    assert torch.equal(one[1], four[1])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_row_fails_no_other_row(broken):
    z = random_logits(np.random.default_rng(4), 3)
    whole = z.clone()
    z[1] = broken if broken == -math.inf else z[1]
    z[1, 7] = broken
    for changes in ({}, {"temperature": 0.0}, {"top_p": 0.5, "logprobs": 2}, {"allowed_token_ids": (1, 2)}):
        rows = [spec(**changes) for _ in range(3)]
        results, healthy = sample(z, rows), sample(whole, rows)
        assert "logits are broken" in results[1].error
        assert results[1].tokens == results[1].logprobs == []
        assert [results[0], results[2]] == [healthy[0], healthy[2]]


def test_a_fully_masked_row_fails_no_other_row():
    z = random_logits(np.random.default_rng(5), 3)
    masked = {"allowed_token_ids": (4, 5), "bad_words": ((4,), (5,))}
    for changes in ({}, {"temperature": 0.0}, {"top_p": 0.5, "top_k": 4, "typical_p": 0.5, "min_p": 0.1}, {"logprobs": 1}):
        rows = [spec(**changes), spec(**changes, **masked), spec(**changes, allowed_token_ids=(4,), bad_words=((5,),))]
        first, second, third = sample(z, rows)
        assert "no token can be drawn" in second.error
        assert second.tokens == second.logprobs == []
        assert len(first.tokens) == 1
        assert third.tokens == [4]


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {VOCAB: 1.0}},
        {"allowed_token_ids": (1, VOCAB)},
        {"bad_words": ((1, VOCAB),)},
        {"stop_token_ids": (VOCAB,)},
        {"prompt": [VOCAB], "repetition_penalty": 1.1},
        {"stop_ids": [VOCAB], "min_tokens": 5},
    ],
)
def test_an_id_outside_the_vocabulary_fails_only_its_row(changes):
    z = random_logits(np.random.default_rng(6), 2)
    good, bad = sample(z, [spec(), spec(**changes)])
    assert str(VOCAB) in bad.error
    assert len(good.tokens) == 1


def test_process_marks_broken_rows():
    z = random_logits(np.random.default_rng(7), 2)
    z[0, 0] = math.nan
    out = process(z, [spec(), spec(top_k=2)])
    assert out[0].isnan().all()
    assert (out[1] > NEVER).sum() == 2


def test_logits_are_not_changed_and_half_precision_is_taken():
    z = random_logits(np.random.default_rng(8), 2)
    before = z.clone()
    rows = [spec(logit_bias={3: 2.0}, temperature=0.5, top_p=0.9, logprobs=3), spec(repetition_penalty=1.2, min_p=0.1)]
    sample(z, rows)
    process(z, rows)
    assert torch.equal(z, before)
    half = z.to(torch.bfloat16)
    assert sample(half, rows) == sample(half.float(), rows)


def test_an_empty_batch_and_no_keys_give_nothing():
    assert sample(torch.zeros(0, 5), []) == []
    z = random_logits(np.random.default_rng(13), 2)
    none, two = sample(z, [spec(n=0, logprobs=1), spec(n=2, logprobs=1)])
    assert none.tokens == none.logprobs == sample(z[:1], [spec(n=0)])[0].tokens == []
    assert two == sample(z[1:], [spec(n=2, logprobs=1)])[0]


# --- log-probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_raw_by_default_and_processed_on_request():
    z = random_logits(np.random.default_rng(9), 1)
    changes = {"n": 3, "temperature": 0.5, "top_k": 4, "logit_bias": {8: 6.0}}
    (raw,) = sample(z, [spec(**changes, logprobs=5)])
    (processed,) = sample(z, [spec(**changes, logprobs=5, logprobs_mode="processed")])
    assert raw.tokens == processed.tokens
    for result, source in ((raw, z), (processed, process(z, [spec(**changes)]))):
        expected = source[0].double().log_softmax(-1)
        order = np.argsort(-source[0].numpy(), kind="stable").tolist()
        for token, entry in zip(result.tokens, result.logprobs, strict=True):
            assert entry.token == token
            assert rounded_once([entry.logprob], [float(expected[token])])
            assert entry.rank == order.index(token) + 1
            assert entry.top_ids == order[: len(entry.top_ids)]
            assert rounded_once(entry.top_logprobs, expected[entry.top_ids].tolist())
    assert [len(result.logprobs[0].top_ids) for result in (raw, processed)] == [5, 4]  # what cannot be drawn is not listed


def test_each_row_has_its_number_of_alternatives():
    z = random_logits(np.random.default_rng(10), 4)
    results = sample(z, [spec(logprobs=0), spec(), spec(logprobs=7), spec(n=2, logprobs=1)])
    assert [[len(entry.top_ids) for entry in result.logprobs] for result in results] == [[0], [], [7], [1, 1]]


def test_raw_logprobs_precede_the_processors_of_the_caller():
    z = random_logits(np.random.default_rng(11), 1)
    changed = z.clone()
    changed[0, 3] = 50.0
    (result,) = sample(changed, [spec(logprobs=1)], raw=z)
    assert result.tokens == [3]
    assert rounded_once([result.logprobs[0].logprob], [float(z[0].double().log_softmax(-1)[3])])


def test_the_greedy_token_has_rank_one_also_on_ties():
    z = torch.tensor([[1.0, 3.0, 3.0, 3.0]])
    (result,) = sample(z, [spec(temperature=0.0, logprobs=3)])
    assert (result.tokens, result.logprobs[0].rank, result.logprobs[0].top_ids) == ([1], 1, [1, 2, 3])


def test_token_logprobs_score_given_tokens():
    rng = np.random.default_rng(12)
    z = random_logits(rng, 300, 4000)
    ids = torch.from_numpy(rng.integers(0, 4000, 300))
    entries = token_logprobs(z, ids, 3)
    expected = z.double().log_softmax(-1)
    assert [entry.token for entry in entries] == ids.tolist()
    assert rounded_once([entry.logprob for entry in entries], expected.gather(-1, ids[:, None])[:, 0].tolist())
    assert [entry.top_ids for entry in entries] == z.topk(3).indices.tolist()
    assert [entry.rank for entry in entries] == (1 + (z > z.gather(-1, ids[:, None])).sum(-1)).tolist()
    assert entries == [token_logprobs(z[i : i + 1], ids[i : i + 1], 3)[0] for i in range(300)]
    assert token_logprobs(z[:1], ids[:1])[0].top_ids == []


@pytest.mark.parametrize("row", [[math.nan, 1.0], [math.inf, 1.0], [NEVER, NEVER]])
def test_token_logprobs_of_a_broken_row_are_nan(row):
    broken, fine = token_logprobs(torch.tensor([row, [0.0, 0.0]]), torch.tensor([1, 1]), 2)
    assert math.isnan(broken.logprob)
    assert (broken.rank, broken.top_ids) == (0, [])
    assert fine.logprob == pytest.approx(math.log(0.5))
