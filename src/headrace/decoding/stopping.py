"""When an output ends, and what of it is shown: stop ids, stop strings, length limits, text that is final (card A3)."""

from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, Request, Sequence
from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer


class Stopping:
    """Appends tokens to sequences until something ends them."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def begin(self, request: Request, seq: Sequence) -> None:
        """Give a request's first sequence its text state (none without a tokenizer)."""
        if self.tokenizer is None:
            return
        params = request.params
        seq.text = IncrementalDetokenizer(self.tokenizer, request.prompt, params.skip_special_tokens)
        if params.stop:
            seq.stops = StopMatcher(params.stop, params.include_stop_str_in_output)

    def extend(self, request: Request, seq: Sequence, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        """Append `tokens` up to the first that ends the output; returns what that adds to it.

        Of its text only that is shown which no later token can change or retract.
        """
        text, stops, shown = seq.text, seq.stops, ""
        early = seq.prompt_len + request.params.min_tokens  # tokens that end nothing; what comes after them may
        for at, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            if seq.constraint is not None:
                seq.constraint.push(token)
            if text is not None:
                piece = text.push(token)
                shown += piece if stops is None or len(seq.tokens) <= early else stops.append(piece)
            self._judge(request, seq, token, early)
            if seq.finish_reason is not None:
                tokens = tokens[:at]
                if stops is None or stops.matched is None:
                    shown += self.rest(seq)
                break
        return Delta(request.id, seq.index, tokens, shown, logprobs[: len(tokens)], seq.finish_reason, seq.stop_reason)

    def rest(self, seq: Sequence) -> str:
        """What was held back of an output's text, when nothing more will come."""
        if seq.text is None:
            return ""
        text: str = seq.text.flush()
        return text if seq.stops is None else seq.stops.append(text) + seq.stops.flush()

    def _judge(self, request: Request, seq: Sequence, token: int, early: int) -> None:
        length, most = len(seq.tokens), request.params.max_tokens
        if token in request.stop_ids and length > early:
            seq.finish_reason = "stop"
            seq.stop_reason = token if token in request.params.stop_token_ids else None
        elif seq.stops is not None and seq.stops.matched is not None:
            seq.finish_reason, seq.stop_reason = "stop", seq.stops.matched
        elif seq.constraint is not None and seq.constraint.done:
            seq.finish_reason = "stop"  # nothing can follow, so the end token is not waited for
        elif (most is not None and length - seq.prompt_len >= most) or length >= self.max_model_len:
            seq.finish_reason = "length"
