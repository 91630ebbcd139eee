"""Draft trees beside what they mean: written out by hand, and by brute force on random trees."""

import random
from collections.abc import Callable

import pytest

from headrace.ops.trees import child, paths, walk

#        -1
#      /  |  \
#     0   3   5        tokens 7, 8, 7: 0 and 5 are equal siblings
#    / \   \
#   1   2   4          tokens 8, 9 and 7
TOKENS, PARENTS = [7, 8, 9, 8, 7, 7], [-1, 0, 0, -1, 3, -1]


def random_tree(rng: random.Random) -> tuple[list[int], list[int]]:
    size = rng.randrange(9)
    return [rng.randrange(3) for _ in range(size)], [rng.randrange(-1, node) for node in range(size)]


def test_paths_end_in_their_node() -> None:
    assert paths(TOKENS, PARENTS) == [[7], [7, 8], [7, 9], [8], [8, 7], [7]]
    assert paths([], []) == []
    with pytest.raises(ValueError, match="argument 2"):
        paths([1, 2], [-1])


def test_paths_of_random_trees() -> None:
    rng = random.Random(0)
    for _ in range(300):
        tokens, parents = random_tree(rng)
        for node, path in enumerate(paths(tokens, parents)):
            at, back = node, []
            while at >= 0:
                back.append(tokens[at])
                at = parents[at]
            assert path == back[::-1]


def test_a_child_has_the_parent_and_the_token_and_is_the_first_of_equals() -> None:
    assert [child(TOKENS, PARENTS, -1, token) for token in (7, 8, 9)] == [0, 3, None]
    assert [child(TOKENS, PARENTS, 0, token) for token in (7, 8, 9)] == [None, 1, 2]
    assert [child(TOKENS, PARENTS, 3, token) for token in (7, 8)] == [4, None]
    assert child(TOKENS, PARENTS, 5, 7) is None
    assert child([], [], -1, 7) is None


def test_a_walk_follows_drawn_tokens_until_a_mismatch() -> None:
    asked: list[int] = []

    def draws(*tokens: int) -> Callable[[int], int]:
        left = iter(tokens)

        def draw(node: int) -> int:
            asked.append(node)
            return next(left)

        asked.clear()
        return draw

    for tokens, accepted in (((7, 9, 7), [0, 2]), ((8, 7, 9), [3, 4]), ((9,), []), ((7, 7), [0])):
        assert walk(TOKENS, PARENTS, draws(*tokens)) == accepted
        assert asked == [-1, *accepted]  # once after each known token, and never after another
    assert walk([], [], draws(7)) == []


def test_a_walk_ends_before_a_node_behind_which_nothing_can_be_drawn() -> None:
    tokens, parents = [7, 8, 9], [-1, 0, 1]
    for count in range(1, 4):
        drawn = iter(tokens[:count])
        assert walk(tokens, parents, lambda _: next(drawn, None)) == list(range(count - 1))  # noqa: B023
    assert walk(tokens, parents, lambda _: None) == []


def test_a_walk_equals_decoding_without_drafts() -> None:
    """The target draws by what it has drawn before: the accepted path is its own text, as far as it was drafted."""
    rng = random.Random(1)
    whole = 0
    for _ in range(500):
        tokens, parents = random_tree(rng)
        text = [rng.randrange(3) for _ in range(len(tokens) + 1)]
        depth = [0] * len(parents)
        for node, parent in enumerate(parents):
            depth[node] = 0 if parent < 0 else depth[parent] + 1
        found = walk(tokens, parents, lambda node: text[0 if node < 0 else depth[node] + 1])  # noqa: B023
        drafted = paths(tokens, parents)
        known = [drafted[node] for node in found]
        assert known == [text[: i + 1] for i in range(len(known))]
        longest = max((len(path) for path in drafted if path == text[: len(path)]), default=0)
        assert len(found) <= longest
        whole += len(found) == longest
    assert whole > 400  # fewer where an equal sibling came first
