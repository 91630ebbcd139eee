"""When an output ends, and what of it is shown: stop ids, stop strings, length limits, text that is final (card A3)."""

from headrace.text.detokenizer import IncrementalDetokenizer
from headrace.text.stop import StopMatcher
from headrace.text.tokenizer import Tokenizer
from headrace.types import Delta, Request, Sequence, TokenLogprob


class OutputText:
    """The text of one output as it grows: pieces leave only when no later token can change or retract them."""

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.shown = ""  # all that was given out

    def push(self, token: int, may_stop: bool = True) -> str:
        """The text that is final now. Stop strings are looked for in what comes after the tokens that may not stop."""
        text = self._detokenizer.push(token)
        if may_stop:
            text = self._matcher.append(text)
        self.shown += text
        return text

    def close(self) -> str:
        """What was held back, when nothing more will come."""
        text = self._matcher.append(self._detokenizer.flush()) + self._matcher.flush()
        self.shown += text
        return text

    @property
    def matched(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    def copy(self) -> "OutputText":
        twin = OutputText(self._detokenizer.copy(), self._matcher.copy())
        twin.shown = self.shown
        return twin


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
        detokenizer = IncrementalDetokenizer(self.tokenizer, request.prompt, params.skip_special_tokens)
        seq.text = OutputText(detokenizer, StopMatcher(params.stop, params.include_stop_str_in_output))

    def extend(self, request: Request, seq: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> Delta:
        """Append `tokens` up to the first that ends the output; returns what that adds to it."""
        delta = Delta(request.id, seq.index)
        text = seq.text
        for at, token in enumerate(tokens):
            seq.tokens.append(token)
            if seq.constraint is not None:
                seq.constraint.push(token)
            delta.token_ids.append(token)
            if logprobs:
                delta.logprobs.append(logprobs[at])
            if text is not None:
                delta.text += text.push(token, len(seq.tokens) - seq.prompt_len >= request.params.min_tokens)
            self._judge(request, seq, token)
            if seq.finish_reason is not None:
                break
        if seq.finish_reason is not None and text is not None and text.matched is None:
            delta.text += text.close()
        delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
        return delta

    def _judge(self, request: Request, seq: Sequence, token: int) -> None:
        params = request.params
        drawn = len(seq.tokens) - seq.prompt_len
        if drawn >= params.min_tokens and token in request.stop_ids:
            seq.finish_reason = "stop"
            seq.stop_reason = token if token in params.stop_token_ids else None
        elif seq.text is not None and seq.text.matched is not None:
            seq.finish_reason, seq.stop_reason = "stop", seq.text.matched
        elif seq.constraint is not None and seq.constraint.done:
            seq.finish_reason = "stop"  # nothing can follow, so the end token is not waited for
        elif (params.max_tokens is not None and drawn >= params.max_tokens) or len(seq.tokens) >= self.max_model_len:
            seq.finish_reason = "length"
