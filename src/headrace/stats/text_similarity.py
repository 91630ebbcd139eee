"""Similarity of two token sequences."""

from collections.abc import Sequence


def rouge_l(candidate: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L F1: length of the longest common subsequence over the mean of both lengths; 1 if both are empty.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", ACL 2004.
    """
    if not candidate and not reference:
        return 1.0
    row = [0] * (len(reference) + 1)
    for token in candidate:
        diagonal = 0
        for column, other in enumerate(reference, 1):
            diagonal, row[column] = row[column], diagonal + 1 if token == other else max(row[column], row[column - 1])
    return 2 * row[-1] / (len(candidate) + len(reference))
