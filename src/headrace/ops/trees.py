"""Draft trees: the path to each node, and the walk that verifies a tree."""

from collections.abc import Callable, Sequence


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The draft tokens from the root down to each node, its own included. parents[i] < i; -1: child of the last known token."""
    result: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        result.append([*(result[parent] if parent >= 0 else ()), token])
    return result


def child(tokens: Sequence[int], parents: Sequence[int], node: int, token: int) -> int | None:
    """The child of `node` (-1: the last known token) with this token, of equals the first; None if there is none."""
    below = (at for at in range(node + 1, len(tokens)) if parents[at] == node and tokens[at] == token)
    return next(below, None)


def walk(tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int | None]) -> list[int]:
    """The accepted nodes: from the last known token (-1), repeatedly the child whose token the target draws there.

    draw(node): the target's token after a node, or None if none can be drawn there. Exact for any drafter: the target draws
    every accepted token after the tokens it has drawn before. After None the walk ends before that node, so that its error
    shows when the node's token is known, as without a draft.
    """
    node, path = -1, list[int]()
    while (token := draw(node)) is not None:
        below = child(tokens, parents, node, token)
        if below is None:
            return path
        path.append(below)
        node = below
    return path[:-1]
