"""Tool calls that repeat an earlier call of the same answer: a model that must call may repeat one without end."""

from headrace.text.dialects.call_parser import Piece


class RepeatFilter:
    """Ends an answer at the first call with the name and arguments of an earlier one; whitespace between JSON tokens does not
    count. The pieces of a call are held back while they equal an earlier call, so no stream shows a repeated call."""

    def __init__(self) -> None:
        self.ended = False
        self._calls: list[tuple[str, str]] = []  # names and arguments
        self._held: list[Piece] = []
        self._in_text = self._escaped = False

    def push(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces that can be shown now."""
        shown: list[Piece] = []
        for piece in pieces:
            if self.ended:
                break
            shown += self._take(piece)
        return shown

    def close(self) -> list[Piece]:
        """The held pieces at the end of the text: an unfinished call is not a repetition."""
        held, self._held = ([] if self.ended else self._held), []
        return held

    def _take(self, piece: Piece) -> list[Piece]:
        if piece.call is None:
            return [*self.close(), piece]
        shown = self.close() if piece.name is not None else []
        if piece.name is not None:
            self._calls.append((piece.name, ""))
            self._in_text = self._escaped = False
        name, arguments = self._calls[-1]
        arguments += self._without_blanks(piece.text)
        self._calls[-1] = name, arguments
        earlier = [other for known, other in self._calls[:-1] if known == name and other.startswith(arguments)]
        if not earlier:
            shown += [*self.close(), piece]
        elif arguments and arguments in earlier:  # a JSON object ends where its text does
            self.ended, self._held = True, []
        else:
            self._held.append(piece)
        return shown

    def _without_blanks(self, text: str) -> str:
        kept = []
        for char in text:
            if self._in_text:
                self._in_text = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char.isspace():
                continue
            else:
                self._in_text = char == '"'
            kept.append(char)
        return "".join(kept)
