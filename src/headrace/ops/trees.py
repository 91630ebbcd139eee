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


def walk(tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int | None]) -> list[int]:
    """The nodes that are accepted: from the last known token (-1) on, whichever child has the token drawn there.

    `draw(node)` gives the target's token after a node. Exact for any drafter: every token of the result is one that the
    target has drawn after what it has drawn before. Where it gives None, nothing can be drawn behind the node: the walk ends
    before it, with the node's own token, so what is wrong there shows when that token is known, as without a draft.
    """
    node, path = -1, list[int]()
    while (token := draw(node)) is not None:
        found = child(tokens, parents, node, token)
        if found is None:
            return path
        path.append(found)
        node = found
    return path[:-1]
