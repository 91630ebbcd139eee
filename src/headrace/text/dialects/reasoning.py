"""Reasoning before an answer: `<think>…</think>` and its like, told apart from the answer while the text comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.text.dialects.call_parser import Piece, begun_length


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The tags of one model family around its reasoning, which is at the beginning of an answer.

    answer: tags around the answer itself, which may be missing.
    """

    opening: str
    closing: str
    answer: tuple[str, str] | None = None


THINK = ReasoningFormat("<think>", "</think>")  # Qwen3, SmolLM3, EXAONE 4, ERNIE 4.5, GLM-Z1
GRANITE_THINK = ReasoningFormat("<think>", "</think>", ("<response>", "</response>"))  # Granite 3.3
MISTRAL_THINK = ReasoningFormat("[THINK]", "[/THINK]")  # Ministral 3, Magistral
SEED_THINK = ReasoningFormat("<seed:think>", "</seed:think>")
FORMATS = (SEED_THINK, MISTRAL_THINK, GRANITE_THINK, THINK)


def reasoning_of(template: str | None) -> ReasoningFormat | None:
    """The format of a chat template; None if it has none."""
    if template is None:
        return None
    return next((form for form in FORMATS if _has_tags(form, template)), None)


def _has_tags(form: ReasoningFormat, template: str) -> bool:
    # A template may build a tag from parts, so the name of the closing one is enough.
    return (form.opening in template or form.closing in template) and (form.answer is None or form.answer[1] in template)


class ReasoningSplitter:
    """Splits the text of one answer into reasoning and answer. It holds back only what may be a tag, and whitespace around
    the reasoning and around the answer's tags, which is dropped."""

    def __init__(
        self, form: ReasoningFormat, *, inside: bool = False, ids: tuple[int | None, int | None] = (None, None)
    ) -> None:
        """inside: the prompt ends with the opening tag. ids: of the tags, if they are control tokens, which texts lack."""
        self._form, self._ids = form, ids
        self._state = "reasoning" if inside else "start"
        self._held = ""
        self._fresh = True  # nothing of the reasoning was shown
        self._wrapped = False  # inside the answer's tags

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
        if (self._form.opening.startswith(lead) or self._may_wrap(lead)) and not final:
            return False
        self._state = "blanks" if self._wraps(lead) else "answer"
        return True

    def _wraps(self, lead: str) -> bool:
        """Whether the answer begins with its tag."""
        return self._form.answer is not None and lead.startswith(self._form.answer[0])

    def _may_wrap(self, lead: str) -> bool:
        """Whether more text may complete the answer's tag."""
        return self._form.answer is not None and self._form.answer[0].startswith(lead) and not self._wraps(lead)

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
        """Whitespace between the reasoning and the answer, and the answer's opening tag."""
        self._held = self._held.lstrip()
        if not self._wrapped and self._may_wrap(self._held) and not final:
            return False
        if not self._wrapped and self._form.answer is not None and self._wraps(self._held):
            self._held, self._wrapped = self._held.removeprefix(self._form.answer[0]), True
            return True
        if self._held:
            self._state = "wrapped" if self._wrapped else "answer"
        return bool(self._held)

    def _in_wrapped(self, pieces: list[Piece], final: bool) -> bool:
        """An answer up to its closing tag, which may be missing. Whitespace before the tag is dropped, so it is held."""
        assert self._form.answer is not None
        before, found, after = self._held.partition(self._form.answer[1])
        if found:
            pieces += [Piece(text)] if (text := before.rstrip()) else []
            self._held, self._state = after, "after"
            return True
        end = len(before) if final else len(before[: len(before) - begun_length(before, self._form.answer[1])].rstrip())
        pieces += [Piece(before[:end])] if end else []
        self._held = before[end:]
        return False

    def _in_after(self, pieces: list[Piece], final: bool) -> bool:
        """Whitespace after the closing tag of the answer."""
        self._state = "answer" if self._held.strip() else "after"
        return self._state == "answer"

    def _in_answer(self, pieces: list[Piece], final: bool) -> bool:
        if self._held:
            pieces.append(Piece(self._held))
        self._held = ""
        return False
