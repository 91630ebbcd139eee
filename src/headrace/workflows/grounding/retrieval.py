"""Retrieval of passages for a question by BM25, with the library bm25s.

Source: Robertson & Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009.
"""

import re
from collections.abc import Sequence
from typing import Any

from headrace.workflows.grounding.documents import Passage

# Words, and single characters of scripts that are written without spaces.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


# A question that shares only these words with the documents is about something else.
STOP_WORDS = frozenset(
    "a about after all also am an and any are as at be been before but by can could did do does for from give had has "
    "have he her his how i if in into is it its list me many may more most much my name no not of on one or our out "
    "please s she should show so some such t tell than that the their them then there these they this to up us was we "
    "were what when where which who whom whose why will with would you your das dem den der des die ein eine einem einen "
    "einer es für im in ist mit nicht oder sich sie sind und von war was wer wie wird wo zu au aux ce ces cette dans de "
    "du elle est et il la le les ou où par pour que quel quelle qui sont sur un une "
    "的 了 是 在 和 有 我 你 他 她 它 们 这 那 个 什 么 吗 呢 吧 啊 也 "
    "都 与 及 或 被 把 对 不 就 而 上 下 中 为 多 少 几 谁 哪 怎 样 请 问".split()
)


def words(text: str) -> list[str]:
    """Return the lower-case words of a text."""
    return WORD.findall(text.lower())


class Index:
    """BM25 index of passages. Raises ValueError if bm25s is not installed."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self.passages = list(passages)
        self._bm25: Any = _library().BM25()
        self._bm25.index([words(f"{passage.source} {passage.text}") or ["_"] for passage in self.passages], show_progress=False)

    def search(self, question: str, most: int = 8) -> list[Passage]:
        """Return the passages that share words with the question, best first; ties go to the earlier passage.

        Empty if they share only stop words, unless the question has no other words.
        """
        known = [word for word in words(question) if word in self._bm25.vocab_dict]
        if not known or (STOP_WORDS.issuperset(known) and not STOP_WORDS.issuperset(words(question))):
            return []
        scores = self._bm25.get_scores(known).tolist()
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        return [self.passages[index] for index in order[:most] if scores[index] > 0]


def _library() -> Any:
    try:
        import bm25s
    except ImportError:
        raise ValueError("retrieval needs bm25s; install it with: pip install '.[ground]' in Headrace's folder") from None
    return bm25s
