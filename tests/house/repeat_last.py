"""A drafter without a model: the last token comes again, and again."""

from headrace.data.types import Draft, Request, Sequence


class RepeatLast:
    name = "repeat"

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return Draft([seq.tokens[-1]] * most, list(range(-1, most - 1)))
