"""The drafters that need no model: what they find, against brute force, and that they forget."""

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.recipe import Recipe, Role
from headrace.data.params import SamplingParams
from headrace.data.plan import MAX_NODES, Answer, Drawn, Failed
from headrace.data.settings import ModelSettings
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import READ_EACH, READ_TOKENS, Drafter, Observes
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.drafting.lookahead import Jacobi, Lookahead
from headrace.drafting.ngram import Ngrams, PromptLookup
from headrace.drafting.speculation import cut_depth, prune
from headrace.drafting.suffix import MEMORY, SEPARATOR, TOKEN_BYTES, SuffixAutomaton, SuffixTree
from headrace.ops.trees import paths
from headrace.startup.loading import open_files
from tests.tiny_files import write_tiny_gguf


def sequence(tokens: list[int]) -> tuple[Request, Sequence]:
    request = Request(id="r", prompt=tokens, params=SamplingParams(), seed=1, strategy=None, arrival=0)
    return request, Sequence(0, list(tokens), len(tokens))


def texts() -> list[list[int]]:
    rng = random.Random(4)
    made = [[rng.randrange(letters) for _ in range(length)] for letters in (2, 3, 8) for length in (1, 2, 5, 40, 120)]
    return [*made, [1] * 30, [1, 2] * 20, list(range(20))]


def longest_repeat(text: list[int]) -> int:
    """The length of the longest end of the text that also ends earlier."""
    earlier = range(1, len(text))
    return max(
        (n for n in range(len(text)) for end in earlier if end >= n and text[end - n : end] == text[len(text) - n :]), default=0
    )


@pytest.mark.parametrize("text", texts(), ids=lambda text: str(len(text)))
def test_prompt_lookup_finds_the_latest_occurrence_of_the_longest_end(text: list[int]) -> None:
    request, seq = sequence(text[:1])
    drafter = PromptLookup(longest=3)
    for end in range(1, len(text) + 1):  # as it grows
        seq.tokens = text[:end]
        draft = drafter.draft(request, seq, 4)
        length = min(3, longest_repeat(seq.tokens))
        if length == 0:
            assert draft is None
            continue
        places = [at for at in range(length, end) if text[at - length : at] == text[end - length : end]]
        assert draft is not None
        assert (draft.tokens, draft.confidence) == (text[places[-1] : min(places[-1] + 4, end)], length)
        assert draft.parents == list(range(-1, len(draft.tokens) - 1))


@pytest.mark.parametrize("text", texts(), ids=lambda text: str(len(text)))
def test_the_automaton_matches_the_longest_repeated_suffix(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end in range(1, len(text) + 1):
        automaton.push(text[end - 1])
        place, length = automaton.repeated()
        assert length == longest_repeat(text[:end])
        assert text[place - length : place] == text[end - length : end]
        assert place < end or length == 0
    assert automaton.states <= 2 * len(text)


def test_a_repeated_suffix_updates_at_most_eight_ends() -> None:
    """Of 20 ends that came before only eight are told that they are here now too: a step's work is cut_depth."""
    automaton = SuffixAutomaton()
    for _ in range(21):
        automaton.push(1)
    assert automaton.repeated() == (20, 20)
    assert automaton.ends == [0, *range(1, 13), *[21] * 9], "eight, and the whole text"


def test_another_text_is_matched_while_the_first_one_grows() -> None:
    rng = random.Random(7)
    past = [rng.randrange(3) for _ in range(200)]
    other = [rng.randrange(3) for _ in range(150)]
    automaton = SuffixAutomaton()
    state = length = 0
    for end in range(1, len(other) + 1):
        if end <= 100:  # the automaton's states are split under the reader's feet
            automaton.push(past[2 * end - 2])
            automaton.push(past[2 * end - 1])
        state, length = automaton.advance(state, length, other[end - 1])
        known = past[: min(2 * end, 200)]
        if end > 100:
            best = max(n for n in range(end + 1) if _inside(other[end - n : end], known))
            assert length == best
        assert _inside(other[end - length : end], known)
        assert known[automaton.ends[state] - length : automaton.ends[state]] == other[end - length : end]


def _inside(part: list[int], whole: list[int]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))


def test_past_outputs_help_their_own_tenant_only() -> None:
    drafter = SuffixTree()
    request, seq = sequence([5, 6, 7, 8, 9, 10])
    drafter.remember(request, seq)
    again, other = sequence([1, 6, 7])
    draft = drafter.draft(again, other, 8)
    assert draft is not None
    assert (draft.tokens, draft.confidence) == ([8, 9, 10], 2)
    again.tenant = b"somebody else"
    assert drafter.draft(again, sequence([1, 6, 7])[1], 8) is None


def test_a_draft_is_as_long_as_its_match_allows_and_never_crosses_outputs() -> None:
    drafter = SuffixTree(factor=1.5)
    request, seq = sequence(list(range(50)))
    drafter.remember(request, seq)
    for match, most in ((2, 3), (4, 6), (20, 8)):
        draft = drafter.draft(request, sequence([99, *range(10, 10 + match)])[1], 8)
        assert draft is not None
        assert draft.tokens == list(range(10 + match, 10 + match + most))
    assert drafter.draft(request, sequence([99, 48, 49])[1], 8) is None, "nothing follows the end of an output"


def test_memory_is_bounded() -> None:
    drafter = SuffixTree(memory=1000)
    rng = random.Random(1)
    for _ in range(40):
        request, seq = sequence([rng.randrange(50) for _ in range(rng.choice([10, 100, 5000]))])
        drafter.begin()
        drafter.remember(request, seq)
        young, *old = drafter.pasts(b"")
        assert young.text[-1] == SEPARATOR
        assert len(young.text) <= 500
        assert all(500 - 5000 < len(past.text) <= 500 for past in old)
        assert len(old) <= 1
        end = young.text[-1 - min(len(seq.tokens), 499) : -1]
        assert end == seq.tokens[-len(end) :]
    for tenant in range(40):
        drafter.pasts(bytes([tenant]))
    assert list(drafter._pasts) == [bytes([tenant]) for tenant in range(24, 40)], (
        "as many tenants as are remembered, the latest"
    )


def test_the_previous_automaton_is_searched() -> None:
    """When an automaton is full a new one begins, and a sequence that is under way finds what is in either of them."""
    drafter = SuffixTree(memory=200)
    request, under_way = sequence([900, 901])
    for text in range(30):
        _, seq = sequence(list(range(20 * text, 20 * text + 20)))
        drafter.begin()
        drafter.draft(request, under_way, 4)
        drafter.remember(request, seq)
        for back, place in ((0, 3), (4, 12)):
            at = 20 * (text - back) + place
            for reader in (under_way, sequence([])[1]) if text >= back else ():
                reader.tokens += [999, at, at + 1]
                draft = drafter.draft(request, reader, 4)
                assert draft is not None
                assert draft.tokens == [at + 2, at + 3, at + 4, at + 5]


@pytest.mark.parametrize("make", [PromptLookup, SuffixTree])
def test_a_long_text_is_read_in_several_steps(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No step reads more than READ_TOKENS tokens, and READ_EACH of each text beyond that, whoever's they are."""
    read = [0]
    for owner, name in ((SuffixAutomaton, "push"), (Ngrams, "_add")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, plain=plain: (read.__setitem__(0, read[0] + 1), plain(*args))[1])
    drafter = make()
    texts = [sequence([*range(5000 + i), 7, 8, 9]) for i in range(3)]
    drafts: dict[int, Draft] = {}
    for step in range(9):
        drafter.begin()
        before = read[0]
        for number, (request, seq) in enumerate(texts):
            if number not in drafts and (draft := drafter.draft(request, seq, 3)) is not None:
                drafts[number] = draft
        assert read[0] - before <= READ_TOKENS + 3 * READ_EACH
        assert (len(drafts) > 0) == (step > 1)
    assert [draft.tokens for draft in drafts.values()] == [[10, 11, 12]] * 3


def test_outputs_that_ended_are_read_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = SuffixTree()
    for at in (0, 10_000):
        drafter.remember(*sequence(list(range(at, at + 5000))))
    lengths = []
    for _ in range(6):
        lengths.append(sum(len(past.text) for past in drafter.pasts(b"")))
        drafter.begin()
    assert lengths == [READ_TOKENS, 2 * READ_TOKENS, 3 * READ_TOKENS, 4 * READ_TOKENS, 10_002, 10_002]
    for at in (0, 10_000):
        draft = drafter.draft(*sequence([at + 4990, at + 4991]), 3)
        assert draft is not None
        assert draft.tokens == [at + 4992, at + 4993, at + 4994]
    for _ in range(100):
        drafter.remember(*sequence(list(range(5000))))
    assert sum(len(tokens) for _, tokens in drafter._ended) <= drafter.memory


def tips_of(draft: Draft) -> list[int]:
    """The last node of each trajectory of lookahead's window, in the order of their columns."""
    tips = {column: node for node, column in enumerate(draft.memo) if column is not None}
    return [tips[column] for column in sorted(tips)]


def test_lookahead_trajectories_form_a_tree_over_their_histories() -> None:
    request, seq = sequence(list(range(40)))
    drafter = Lookahead(width=4, length=4, guesses=2)
    draft = drafter.draft(request, seq, 8)
    assert draft is not None
    window = seq.decode.memory["lookahead"]
    seen = paths(draft.tokens, draft.parents)
    for column, tip in enumerate(tips_of(draft)):
        assert seen[tip] == [*window.levels[0][: column + 1], *(level[column] for level in window.levels[1:])]
    assert len(draft.tokens) == 4 * 3


def test_lookahead_collects_ngrams_of_its_trajectories() -> None:
    request, seq = sequence(list(range(40)))
    drafter = Lookahead(width=3, length=3, guesses=2)
    draft = drafter.draft(request, seq, 8)
    assert draft is not None
    window = seq.decode.memory["lookahead"]
    before = [list(level) for level in window.levels]
    nodes = tuple(Drawn((100 + node,)) for node in range(len(draft.tokens)))
    drafter.observe(request, seq, draft, (), nodes)
    for column, tip in enumerate(tips_of(draft)):
        assert (before[1][column], 100 + tip) in window.pool[before[0][column]]
    assert window.levels == [before[1], [100 + tip for tip in tips_of(draft)]]
    seq.tokens.append(before[0][1])
    again = drafter.draft(request, seq, 8)
    assert again is not None
    latest = list(window.pool[before[0][1]])[-1]
    assert tuple(again.tokens[:2]) == latest, "what begins with the last token is verified first"


def test_a_narrow_lookahead_window_collects_ngrams() -> None:
    """Where few tokens may be drafted, or budget cuts the tree, the trajectories that had room go on; the others wait."""
    for most, answered in ((3, None), (8, 5)):
        request, seq = sequence(list(range(40)))
        drafter = Lookahead(width=4, length=3, guesses=2)
        draft = drafter.draft(request, seq, most)
        assert draft is not None
        window = seq.decode.memory["lookahead"]
        before = [list(level) for level in window.levels]
        nodes = tuple(Drawn((100 + node,)) for node in range(answered or len(draft.tokens)))
        drafter.observe(request, seq, draft, (), nodes)
        assert sum(map(len, window.pool.values())) == 2
        assert window.levels[0] == [*before[1][:2], *before[0][2:]]
        assert window.levels[1] == [*(100 + tip for tip in tips_of(draft)[:2]), *before[1][2:]]


def test_the_pool_keeps_the_latest_guesses() -> None:
    request, seq = sequence([1, 2])
    drafter = Lookahead(width=2, length=3, guesses=2)
    drafter.draft(request, seq, 8)
    window = seq.decode.memory["lookahead"]
    for follows in ((1, 1), (2, 2), (1, 1), (3, 3)):
        drafter._collect(window, (9, *follows))
    assert list(window.pool[9]) == [(1, 1), (3, 3)]


@pytest.mark.parametrize(("width", "guesses"), [(0, 5), (5, 0)])
def test_lookahead_without_a_window_or_without_guesses_is_plain_decoding(width: int, guesses: int) -> None:
    request, seq = sequence([1, 2, 3])
    assert Lookahead(width=width, guesses=guesses).draft(request, seq, 8) is None


def test_lookahead_needs_its_nodes_to_fit_a_mask() -> None:
    with pytest.raises(ValueError, match="64"):
        Lookahead(width=10, length=5, guesses=10)


def test_prompt_n_grams_are_an_option_of_lookahead() -> None:
    """W24: lookahead's n-grams come from its trajectories; the prompt's are prompt lookup by another name."""
    text = [1, 2, 3, 4, 5, 6, 1]
    for from_prompt in (False, True):
        request, seq = sequence(text)
        draft = Lookahead(width=3, length=4, guesses=3, from_prompt=from_prompt).draft(request, seq, 8)
        assert draft is not None
        assert (draft.tokens[:3] == [2, 3, 4]) == from_prompt


def test_jacobi_continues_with_the_answers_after_the_accepted_tokens() -> None:
    request, seq = sequence([1, 2, 3])
    drafter = Jacobi(width=4)
    draft = drafter.draft(request, seq, 8)
    assert isinstance(draft, Draft)
    assert len(draft.tokens) == 4
    drafter.observe(request, seq, draft, (0,), tuple(Drawn((10 + i,)) for i in range(4)))
    again = drafter.draft(request, seq, 3)
    assert again is not None
    assert again.tokens == [11, 12, 13]


# -- what holds for every drafter ------------------------------------------------------------------------------------------


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": PromptLookup,
    "suffix": SuffixTree,
    "lookahead": Lookahead,
    "short lookahead": lambda: Lookahead(width=9, length=2, guesses=9),
    "long lookahead": lambda: Lookahead(width=4, length=9, guesses=4, from_prompt=True),
    "jacobi": lambda: Jacobi(80),
    "heads": lambda: TrainedHeads(5),
    "draft": DraftModel,
    "self": lambda: DraftModel("self", group=None),
}


def depth(draft: Draft) -> int:
    return max(len(path) for path in paths(draft.tokens, draft.parents))


def answered(rng: random.Random, draft: Draft) -> tuple[tuple[int, ...], tuple[Answer, ...]]:
    """A verification of a draft, cut short or not: an accepted path, and after each node a token, or nothing to draw."""
    fed = rng.randint(1, len(draft.tokens))
    nodes = tuple(rng.choice([Failed("nothing"), *[Drawn((rng.randrange(6),))] * 3]) for _ in range(fed))
    path: list[int] = []
    while below := [node for node in range(fed) if draft.parents[node] == (path[-1] if path else -1) and rng.random() < 0.7]:
        path.append(below[0])
    return tuple(path), nodes


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_draft_exceeds_its_depth_or_mask_size(name: str) -> None:
    """Whatever was heard, and whatever a grammar left of the draft before."""
    rng = random.Random(11)
    deepest = 0
    for text in range(8):
        drafter = DRAFTERS[name]()
        request, seq = sequence([rng.randrange(6) for _ in range(rng.choice([1, 4, 60]))])
        request.seed = text
        for _ in range(60):
            most = rng.choice([1, 2, 3, 4, 5, 7, 11, 16, MAX_NODES])
            draft = drafter.draft(request, seq, most)
            if draft is None:
                seq.tokens.append(rng.randrange(6))
                continue
            assert draft.observed == isinstance(drafter, Observes), "who learns from answers hears them"
            assert 1 <= depth(draft) <= most
            assert len(draft.tokens) <= MAX_NODES
            deepest = max(deepest, depth(draft) - most)
            left = prune(draft, fitting(rng, draft))
            if left is not None and isinstance(drafter, Observes):
                path, nodes = answered(rng, left)
                drafter.observe(request, seq, left, path, nodes)
                seq.tokens += [left.tokens[node] for node in path]
            seq.tokens.append(rng.randrange(6))
    assert deepest == 0, "nothing came near the bound"


def fitting(rng: random.Random, draft: Draft) -> list[bool]:
    """Random nodes, with all those above them."""
    fits: list[bool] = []
    for parent in draft.parents:
        fits.append((parent < 0 or fits[parent]) and rng.random() < 0.95)
    return fits


def test_a_draft_beyond_its_bounds_is_truncated() -> None:
    chain = Draft([7] * 90, list(range(-1, 89)))
    cut = cut_depth(chain, 5)
    assert cut is not None
    assert (cut.tokens, cut.parents) == ([7] * 5, [-1, 0, 1, 2, 3])
    siblings = cut_depth(Draft(list(range(90)), [-1] * 90, memo=list(range(90))), 5)
    assert siblings is not None
    assert (siblings.tokens, siblings.memo) == (list(range(MAX_NODES)), list(range(MAX_NODES)))
    tree = cut_depth(Draft([1, 2, 3, 4], [-1, 0, 1, 0], memo=["a", "b", "c", "d"]), 2)
    assert tree is not None
    assert (tree.tokens, tree.parents, tree.memo) == ([1, 2, 4], [-1, 0, 0], ["a", "b", "d"])
    assert cut_depth(Draft([], []), 5) is None


def test_after_a_node_with_nothing_to_draw_lookahead_and_jacobi_go_on() -> None:
    request, seq = sequence(list(range(40)))
    drafter = Lookahead(width=3, length=3, guesses=2)
    draft = drafter.draft(request, seq, 8)
    assert draft is not None
    window = seq.decode.memory["lookahead"]
    before = [list(level) for level in window.levels]
    nodes: list[Answer] = [Drawn((100 + node,)) for node in range(len(draft.tokens))]
    tips = tips_of(draft)
    nodes[tips[1]] = Failed("no token can be drawn")
    drafter.observe(request, seq, draft, (), tuple(nodes))
    assert window.levels == [
        [before[1][0], before[0][1], before[1][2]],
        [100 + tips[0], before[1][1], 100 + tips[2]],
    ]
    assert sum(map(len, window.pool.values())) == 2
    jacobi = Jacobi(width=4)
    draft = jacobi.draft(request, seq, 4)
    assert draft is not None
    nodes = [Drawn((100 + node,)) for node in range(4)]
    nodes[2] = Failed("no token can be drawn")
    jacobi.observe(request, seq, draft, (0,), tuple(nodes))
    assert seq.decode.memory["jacobi"] == [101], "what is known beyond the gap is of another place"


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_lookahead_reads_the_nodes_that_a_grammar_allows(dropped: int) -> None:
    """A trajectory is pruned whole; the answers of the others are theirs, wherever their nodes are now."""
    request, seq = sequence(list(range(40)))
    drafter = Lookahead(width=3, length=3, guesses=2)
    draft = drafter.draft(request, seq, 8)
    assert draft is not None
    window = seq.decode.memory["lookahead"]
    before = [list(level) for level in window.levels]
    tips = tips_of(draft)
    answers = {tip: 100 + column for column, tip in enumerate(tips)}
    left = prune(draft, [node != tips[dropped] for node in range(len(draft.tokens))])
    assert left is not None
    kept = [node for node in range(len(draft.tokens)) if node != tips[dropped]]
    nodes = tuple(Drawn((answers.get(node, 99),)) for node in kept)
    drafter.observe(request, seq, left, (), nodes)
    collected = {(first, *rest) for first, many in window.pool.items() for rest in many}
    assert collected == {(before[0][column], before[1][column], 100 + column) for column in range(3) if column != dropped}


def test_the_suffixes_of_all_tenants_together_are_bounded() -> None:
    """Sixteen tenants with two automata each were 3.2 million tokens: 1.3 GB that nothing counted."""
    drafter = SuffixTree(memory=1000)
    for number in range(40):
        tenant = b"tenant %d" % (number % 10)
        request, seq = sequence([number * 300 + at for at in range(300)])
        request.tenant = tenant
        drafter.begin()
        drafter.remember(request, seq)
        assert drafter.remembered <= 1000 + 301
        assert drafter.pasts(tenant)[0].text[-2:] == [number * 300 + 299, SEPARATOR], "the last one is there"


@pytest.mark.parametrize("different", [2, 50, 10**6])
def test_a_token_takes_no_more_than_the_memory_plan_counts(different: int) -> None:
    tracemalloc.start()
    try:
        automaton, rng = SuffixAutomaton(), random.Random(1)
        for _ in range(4000):
            automaton.push(rng.randrange(different))
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 100 * 4000 < taken <= TOKEN_BYTES * 4000


def test_the_memory_plan_counts_automata(tmp_path: Path) -> None:
    """Those of running sequences by block, those of ended outputs as a whole."""
    target = open_files(write_tiny_gguf(tmp_path / "tiny.gguf", context=128))

    def blocks(speculate: str, free: int, **more: Any) -> int:
        recipe = Recipe((Role("target", target),), ModelSettings(speculate=speculate, **more))
        return recipe.plan(lambda config, window: [10_000], 4, free).num_blocks

    assert blocks("ngram", 10**9, kv_cache_memory=10**6) == 100
    assert blocks("suffix", 10**9, kv_cache_memory=10**6) == 10**6 // (10_000 + 16 * TOKEN_BYTES)
    remembered = MEMORY * TOKEN_BYTES
    assert blocks("suffix", remembered + 2 * 10**6) < blocks("ngram", remembered + 2 * 10**6)
