"""/v1/completions: prompts as texts or token ids, continued without a template."""

from collections.abc import Iterable
from typing import Any

from headrace.server.protocols.fields import COMPLETION_UNSUPPORTED, CompletionRequest, StreamOptions
from headrace.server.protocols.generation import Answer, AnswerEvent, Generation, GenerationRequest, TextProtocol, Writer
from headrace.server.protocols.logprobs import CompletionLogprobs, EncodedLogprobs, joined
from headrace.server.protocols.openai_types import Completion, CompletionChoice, new_id, now
from headrace.server.protocols.prompts import Texts
from headrace.server.protocols.sampling import check_stream_options, refuse_unsupported
from headrace.server.protocols.stream import sse_event as sse

# The default of the protocol.
DEFAULT_MAX_TOKENS = 16


def read(body: CompletionRequest) -> GenerationRequest:
    """Raises ApiError for fields that contradict each other, or that ask for something not built."""
    refuse_unsupported(body, COMPLETION_UNSUPPORTED)
    check_stream_options(body)
    return GenerationRequest(
        body,
        Texts(body.prompt),
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        form_field="structured_outputs",
    )


class CompletionWriter(Writer):
    """The answers as choices: texts, `n` for each prompt."""

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._id, self._created = new_id("cmpl"), now()
        self._options = self.sampling.stream_options or StreamOptions()
        self._lists: dict[int, CompletionLogprobs] = {}  # by answer

    async def logprobs(self, event: AnswerEvent) -> EncodedLogprobs | None:
        request = self.generation.request
        if request.logprobs is None:
            return None
        if event.index not in self._lists:
            prompt = self.generation.inflight[event.index // (self.sampling.n or 1)].prompt
            self._lists[event.index] = CompletionLogprobs(self.tokenizer, request.logprobs, prompt, request.echo)
        return await self._lists[event.index].encode(event.token_ids, event.logprobs)

    def chunks(self, event: AnswerEvent, logprobs: EncodedLogprobs | None) -> Iterable[bytes]:
        exits, reason = self.exits(event), event.finish_reason
        scores = None if logprobs is None else joined(logprobs)
        choice = CompletionChoice(event.index, event.text, scores, reason, event.stop_reason, exits)
        if choice.text or choice.logprobs is not None or choice.exits or reason is not None:
            more: dict[str, Any] = {"usage": None} if self._options.include_usage else {}
            if self._options.continuous_usage_stats:
                more["usage"] = self.generation.usage
            yield sse(self._completion([choice], **more))

    def end(self) -> Iterable[bytes]:
        if self._options.include_usage:
            yield sse(self._completion([], usage=self.generation.usage))

    def complete(self, answers: list[Answer]) -> Completion:
        choices = [
            CompletionChoice(
                answer.index,
                answer.text,
                None if answer.logprobs is None else joined(answer.logprobs),
                answer.finish_reason,
                answer.stop_reason,
                answer.exits,
            )
            for answer in answers
        ]
        return self._completion(choices, usage=self.generation.usage)

    def _completion(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        name, fingerprint = self.generation.model, self.generation.service.fingerprint
        return Completion(self._id, self._created, name, choices, system_fingerprint=fingerprint, **more)


COMPLETIONS = TextProtocol(read, CompletionWriter)
