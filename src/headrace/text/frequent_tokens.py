"""Frequent tokens of a vocabulary: a draft restricted to them computes a small part of its head.

Source: FR-Spec, Zhao et al., arXiv 2502.14856.
"""

from collections.abc import Iterable

from headrace.text.tokenizer import Tokenizer

# Markup whose tokens are frequent in answers and late in vocabularies.
MARKUP = (
    "```",
    "```\n",
    "\n```\n",
    "```python\n",
    "**",
    "###",
    "\n\n###",
    "`,",
    "`.",
    ":\n\n",
    ".\n\n",
    "):\n",
    "();\n",
    "});\n",
)


def frequent_tokens(tokenizer: Tokenizer, vocab_size: int, count: int, more: Iterable[int] = ()) -> list[int]:
    """Return the ids of about `count` tokens, ascending.

    These are the first of the vocabulary (byte-pair merges are ordered by frequency), the tokens of common markup, the end
    tokens, and `more`.
    """
    chosen = set(range(min(count, vocab_size))) | set(tokenizer.eos_ids) | set(more)
    for text in MARKUP:
        chosen.update(tokenizer.encode(text, add_special=False))
    return sorted(token for token in chosen if token < vocab_size)
