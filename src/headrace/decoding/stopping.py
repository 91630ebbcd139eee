"""Ends outputs and decides which text is final: stop ids, stop strings, length limits."""

from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, Request, Sequence
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


class Stopping:
    """Appends tokens to sequences until something ends them; owned by an engine."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def begin(self, request: Request, seq: Sequence) -> None:
        """Give a request's first sequence its text state (none without a tokenizer)."""
        if self.tokenizer is None:
            return
        params = request.params
        seq.text.words = IncrementalDetokenizer(self.tokenizer, seq.tokens, params.skip_special_tokens)
        if params.stop:
            seq.text.stops = StopMatcher(params.stop, params.include_stop_str_in_output)

    def extend(self, request: Request, seq: Sequence, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        """Append `tokens` up to the first that ends the output; returns the delta. Its text is final: no later token can change
        it."""
        text, constraint, shown = seq.text, seq.decode.constraint, ""
        words, stops = text.words, text.stops
        early = seq.prompt_len + request.params.min_tokens  # up to this length nothing ends the output
        for at, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            if constraint is not None:
                constraint.push(token)
            if words is not None:
                piece = words.push(token)
                shown += piece if stops is None or len(seq.tokens) <= early else stops.append(piece)
            self._judge(request, seq, token, early)
            if text.finish_reason is not None:
                tokens = tokens[:at]
                if stops is None or stops.matched is None:
                    shown += self.rest(seq)
                break
        return Delta(request.id, seq.decode.index, tokens, shown, logprobs[: len(tokens)], text.finish_reason, text.stop_reason)

    def rest(self, seq: Sequence) -> str:
        """The text held back so far, when no more tokens come."""
        text = seq.text
        if text.words is None:
            return ""
        held: str = text.words.flush()
        return held if text.stops is None else text.stops.append(held) + text.stops.flush()

    def _judge(self, request: Request, seq: Sequence, token: int, early: int) -> None:
        length, most, text = len(seq.tokens), request.params.max_tokens, seq.text
        if token in request.stop_ids and length > early:
            text.finish_reason = "stop"
            text.stop_reason = token if token in request.params.stop_token_ids else None
        elif text.stops is not None and text.stops.matched is not None:
            text.finish_reason, text.stop_reason = "stop", text.stops.matched
        elif seq.decode.constraint is not None and seq.decode.constraint.done:
            text.finish_reason = "stop"  # no token can follow, so no end token is needed
        elif (most is not None and length - seq.prompt_len >= most) or length >= self.max_model_len:
            text.finish_reason = "length"
