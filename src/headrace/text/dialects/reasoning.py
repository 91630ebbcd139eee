"""Reasoning before an answer: `<think>…</think>` and its like, told apart from the answer while the text comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.text.dialects.call_parser import Piece, begun_length


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of one model family around its reasoning, which is at the beginning of an answer."""

    opening: str
    closing: str


THINK = ReasoningFormat("<think>", "</think>")  # Qwen3, SmolLM3, EXAONE 4, ERNIE 4.5, GLM-Z1, Granite 3.3
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]")  # Ministral 3, Magistral
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")
FORMATS = (SEED_THINK, MISTRAL_THINK, THINK)


def reasoning_of(template: str | None) -> ReasoningFormat | None:
    """The format of a chat template; None if it has none."""
    if template is None:
        return None
    # A template may build a tag from parts, so the name of the closing one is enough.
    return next((form for form in FORMATS if form.opening in template or form.closing in template), None)


class ReasoningSplitter:
    """Splits the text of one answer into reasoning and answer. It holds back only what may be a tag, and whitespace around
    the reasoning, which is dropped."""

    def __init__(
        self, form: ReasoningFormat, *, inside: bool = False, ids: tuple[int | None, int | None] = (None, None)
    ) -> None:
        """inside: the prompt ends with the opening tag. ids: of the tags, if they are control tokens, which texts lack."""
        self._form, self._ids = form, ids
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._fresh = True  # nothing of the reasoning was shown

    @property
    def inside(self) -> bool:
        """Whether the text so far ends in the reasoning."""
        return self._state == "reasoning"

    def push(
        self, text: str, token_ids: Sequence[int] = (), decode: Callable[[list[int]], str] | None = None, *, final: bool = False
    ) -> list[Piece]:
        """The pieces of more text. token_ids: of this text. final: no text comes after it."""
        opening, closing = self._ids
        if self._state == "start" and opening is not None and opening in token_ids:
            self._state = "reasoning"
        if self._state == "reasoning" and closing is not None and closing in token_ids and decode is not None:
            after = decode(list(token_ids[token_ids.index(closing) + 1 :]))
            before = text.removesuffix(after) if after else text
            pieces = self._reasoning(self._held + before, final=True)
            self._held, self._state = "", "blanks"
            return pieces + self.push(text[len(before) :], final=final)
        self._held += text
        pieces = list[Piece]()
        while getattr(self, f"_in_{self._state}")(pieces, final):
            pass
        return pieces

    def _in_start(self, pieces: list[Piece], final: bool) -> bool:
        lead = self._held.lstrip()
        if lead.startswith(self._form.opening):
            self._held, self._state = lead.removeprefix(self._form.opening), "reasoning"
            return True
        if self._form.opening.startswith(lead) and not final:
            return False
        self._state = "answer"
        return True

    def _in_reasoning(self, pieces: list[Piece], final: bool) -> bool:
        before, found, after = self._held.partition(self._form.closing)
        if found:
            pieces += self._reasoning(before, final=True)
            self._held, self._state = after, "blanks"
            return True
        self._held = ""
        pieces += self._reasoning(before, final=final)
        return False

    def _reasoning(self, text: str, *, final: bool) -> list[Piece]:
        """Show reasoning. What may be the beginning of a tag, and whitespace at the end, is held."""
        if self._fresh:
            text = text.lstrip()
        shown = text if final else text[: len(text) - begun_length(text, self._form.closing)]
        end = len(shown.rstrip())
        self._held = "" if final else text[end:]
        self._fresh = self._fresh and not end
        return [Piece(text[:end], reasoning=True)] if end else []

    def _in_blanks(self, pieces: list[Piece], final: bool) -> bool:
        """Whitespace between the reasoning and the answer."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = "answer"
        return bool(self._held)

    def _in_answer(self, pieces: list[Piece], final: bool) -> bool:
        if self._held:
            pieces.append(Piece(self._held))
        self._held = ""
        return False
