"""Which passages speak of a question: BM25 (Robertson and Zaragoza, 2009), by the library bm25s."""

import re
from collections.abc import Sequence
from typing import Any

from headrace.workflows.grounding.documents import Passage

# Words, and single characters of scripts that are written without spaces.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


def words(text: str) -> list[str]:
    """What is compared: lower-case words."""
    return WORD.findall(text.lower())


class Index:
    """Passages, findable by their words. Raises ValueError where bm25s is not installed."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        self._bm25: Any = _library().BM25()
        self._bm25.index([words(f"{one.source} {one.text}") or ["_"] for one in self.passages], show_progress=False)

    def search(self, question: str, most: int = 8) -> list[Passage]:
        """The passages that share words with the question, best first; of equals the earlier one."""
        asked = [word for word in words(question) if word in self._bm25.vocab_dict]
        if not asked:
            return []
        scores = self._bm25.get_scores(asked).tolist()
        order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
        return [self.passages[at] for at in order[:most] if scores[at] > 0]


def _library() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ValueError("retrieval needs bm25s; install it with: pip install '.[ground]' in Headrace's folder") from None
    return bm25s
