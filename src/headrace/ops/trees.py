"""Draft trees: what comes before each node, and the walk that verifies one."""

from collections.abc import Callable, Sequence


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The draft tokens from below the last known token down to each node, its own included. parents[i] < i, -1: a root."""
    found: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append([*(found[parent] if parent >= 0 else ()), token])
    return found


def child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """The child of `node` (-1: the last known token) that has the token; of equal siblings the first; None: there is none."""
    below = (at for at in range(node + 1, len(tokens)) if parents[at] == node and tokens[at] == token)
    return next(below, None)


def walk(tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int]) -> list[int]:
    """The nodes that are accepted: from the last known token (-1) on, whichever child has the token drawn there.

    `draw(node)` gives the target's token after a node. Exact for any drafter: every token of the result is one that the
    target has drawn after what it has drawn before.
    """
    node, path = -1, list[int]()
    while (found := child(tokens, parents, node, draw(node))) is not None:
        path.append(found)
        node = found
    return path
