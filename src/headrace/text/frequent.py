"""The tokens that texts are mostly made of: a draft that chooses among these alone skips most of its head (FR-Spec, 2025)."""

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
    """Ids of about `count` tokens, ascending: the first of the vocabulary, which byte-pair merges list by how often they
    occurred, the tokens of common markup, those that end a text, and `more`."""
    chosen = set(range(min(count, vocab_size))) | set(tokenizer.eos_ids) | set(more)
    for text in MARKUP:
        chosen.update(tokenizer.encode(text, add_special=False))
    return sorted(token for token in chosen if token < vocab_size)
