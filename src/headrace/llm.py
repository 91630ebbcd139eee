"""`LLM`: the offline face. It opens a model, plans memory, owns an engine, and turns prompts into outputs."""

import logging
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.given import Params, Prompt, as_batch, spread
from headrace.data.outputs import CompletionOutput, Embedding, RequestOutput, Score, empty_output, unit
from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.decoding.base import Strategy
from headrace.decoding.looking import look_again
from headrace.decoding.processors import Processor
from headrace.decoding.prompts import Pooling, Scoring
from headrace.drafting.methods import speculation
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.signals import Uninterrupted
from headrace.engine.turns import Turns
from headrace.runner.executor import InProcess
from headrace.startup.backend import Started, start
from headrace.startup.loading import open_files, open_roles, pick_device
from headrace.startup.recipe import BLOCK_SIZE, Recipe, Settings
from headrace.weights.progress import Moving, Progress, Silent, on_terminal, waiting

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "Score"]

log = logging.getLogger("headrace")

Messages = Sequence[Mapping[str, Any]]
Inbox = deque[Delta]  # where a caller finds what steps, its own or another thread's, have brought it


class LLM:
    """A model ready to generate, in this process.

    `model`: catalog name, .gguf path, folder with safetensors, or hub id. `backend`: auto (on a CPU the native core), native,
    torch. `dtype`: auto, float64, float32, bfloat16, float16; any but bfloat16 runs in torch. `kv_dtype`: auto, bfloat16,
    int8 (native), or a torch dtype. `quantize`: int8 or int4 makes integers of float weights at load (native).
    `kv_cache_memory`: bytes or "2GiB"; by default a quarter of free memory at most. `draft` and `amateur` name companions of
    the same vocabulary: a model that drafts for speculation (or a folder of heads trained for this model), and one that
    contrastive decoding is a contrast to. `speculate` (auto, ngram, suffix, lookahead, jacobi, draft, heads, self, None) drafts
    tokens that the model verifies together; auto is prompt lookup on the native core. Outputs depend on the request and its
    seed alone, not on drafts, batch or chunks: bitwise on the native core, near-tie-exact in torch, whose sums depend on how
    many rows there are (`verification` rejection and block draw other samples by design). `draft_tokens` fixes how many at
    once; by default what was measured decides. `draft_vocab`: among how many of the most frequent tokens the draft chooses
    (0: all). Raises ValueErrors of one line that say what to change.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory: int | str | None = None,
        kv_dtype: str = "auto",
        quantize: str | None = None,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        preset: str = "offline",
        policy: str = "continuous",
        draft: str | Path | None = None,
        amateur: str | Path | None = None,
        speculate: str | None = "auto",
        draft_tokens: int | None = None,
        draft_vocab: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.progress = on_terminal() if progress is None else progress
        with waiting(self.progress, f"loading {Path(model).name}"):
            self.device, self.opened = pick_device(device), open_files(model, progress)
            recipe = Recipe(
                open_roles(self.opened, draft, amateur, speculate == "self", progress),
                Settings(
                    str(self.device),
                    backend=backend,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                    quantize=quantize,
                    threads=threads,
                    max_num_seqs=max_num_seqs,
                    max_model_len=max_model_len,
                    kv_cache_memory=kv_cache_memory,
                    draft_vocab=draft_vocab,
                ),
                self.progress,
            )
            started = start(recipe)
        self.tokenizer, self.model_config, self.memory_plan = self.opened.tokenizer, self.opened.config, started.plan
        self.runner, self.backend, self.dtype, self.exactness = started.runner, started.name, started.dtype, started.exactness
        log.info("%s; %s (%s) on %s, %s", self.memory_plan.said, self.backend, self.exactness, self.device, self.dtype)
        scheduler = _scheduler(preset, started, max_num_seqs, policy, max_num_batched_tokens, self.model_config.encoder)
        self.engine = Engine(
            InProcess(self.runner),
            EngineConfig(scheduler, CacheConfig(self.memory_plan.num_blocks, BLOCK_SIZE, enable_prefix_caching)),
            vocab_size=self.model_config.vocab_size,
            tokenizer=self.tokenizer,
            eos_ids=self.opened.eos_ids,
            groups=recipe.groups(),
            speculation=_speculation(speculate, started, draft_tokens, recipe),
        )
        self._open: dict[str, tuple[RequestOutput, Inbox]] = {}
        self._turns, self._seeds = Turns(), random.Random(seed) if seed is not None else None

    # -- what callers use ----------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        processors: Sequence[Processor] = (),
        strategy: Strategy | None = None,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts (texts or token ids); `params`: one for all or one each.

        No chat template is applied. A request that fails while running has `error` set and finish_reason "error"; one that
        could never run raises AdmissionError before anything runs. Threads may call at once: their requests run together, and
        each gets its own. One `strategy` object serves the whole batch: what it remembers belongs in `request.state` and
        `seq.decode.state`.
        """
        batch = as_batch(prompts)
        settings = spread(params or SamplingParams(), len(batch))
        told = self.progress if len(batch) > 1 and isinstance(self.progress, Moving) else Silent()
        return self._run(batch, settings, tuple(processors), strategy, told)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: Params | Sequence[Params] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Like `generate`, for conversations ([{"role": …, "content": …}, …]) put through the model's chat template."""
        talks = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([self.render(talk, **template) for talk in talks], params)  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        processors: Sequence[Processor] = (),
        output: list[RequestOutput] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> Iterator[Delta]:
        """Deltas of one prompt as they come. Closing the iterator aborts the request. `output`, if given, receives the
        RequestOutput that fills up on the way (metrics, token ids). `cancelled` is asked between steps, also where a step
        gives no delta; once it says yes the request ends with finish_reason "abort"."""
        inbox: Inbox = deque()
        (made,) = self._add_all([prompt], spread(params or SamplingParams(), 1), tuple(processors), None, inbox=inbox)
        if output is not None:
            output.append(made)
        yield from self._drain([made], inbox, cancelled)

    def add(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        processors: Sequence[Processor] = (),
        strategy: Strategy | None = None,
    ) -> RequestOutput:
        """Queue one prompt for callers who feed the engine as they go: its output fills up with every `step`."""
        (output,) = self._add_all([prompt], spread(params or SamplingParams(), 1), tuple(processors), strategy)
        return output

    def step(self) -> list[RequestOutput]:
        """One engine step for everything queued; the outputs that ended in it, none when there is nothing to do."""
        with self._turns:
            return self._step()

    def _step(self) -> list[RequestOutput]:
        ended = []
        with Uninterrupted():
            for delta in self.engine.step():
                if delta.request_id not in self._open:
                    continue  # its caller has gone
                output, inbox = self._open[delta.request_id]
                output.add(delta)
                inbox.append(delta)
                if output.finished:
                    look_again(output)
                    del self._open[delta.request_id]
                    ended.append(output)
        return ended

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[Score]:
        """Log-probability of every token of each text given those before it."""
        prompts = self._encode_running(texts)
        params = [SamplingParams(prompt_logprobs=0, max_tokens=1)] * len(prompts)
        outputs = self._run(prompts, params, (), Scoring(), Silent())
        for output in outputs:
            if output.error is not None:
                raise ValueError(output.error)
        return [
            Score(output.prompt_token_ids, [entry.logprob for entry in (output.prompt_logprobs or []) if entry is not None])
            for output in outputs
        ]

    def embed(
        self, texts: Prompt | Sequence[Prompt], *, pooling: str | None = None, dimensions: int | None = None
    ) -> list[Embedding]:
        """A vector of length 1 for each text. `pooling`: mean, last or (encoders) first; default: the model's own, `last` of
        a decoder. `dimensions` keeps that many leading numbers, of models trained for it. Raises ValueError."""
        size = self.model_config.hidden_size
        if dimensions is not None and not 1 <= dimensions <= size:
            raise ValueError(f"dimensions must be 1 to {size} of this model, not {dimensions}")
        batch = self._encode_running(texts)
        params = [SamplingParams(max_tokens=1)] * len(batch)
        inbox: Inbox = deque()
        outputs = self._add_all(batch, params, (), Pooling(pooling or self.opened.pooling), inbox)
        for _ in self._drain(outputs, inbox):
            pass
        if failed := next((output.error for output in outputs if output.error is not None), None):
            raise ValueError(failed)
        return [Embedding(output.prompt_token_ids, unit(output.pooled, dimensions)) for output in outputs]

    def render(self, messages: Messages, **template: Any) -> list[int]:
        """Token ids of a conversation, ready for the answer. Raises TemplateError when the model has no template."""
        text = self.opened.template.render(messages, **{"add_generation_prompt": True, **template})
        return self.tokenizer.encode(text, add_special=False)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The catalog's or the model's own sampling settings, with changes."""
        return SamplingParams(**{"max_tokens": None, **self.opened.sampling, **changes})

    def close(self) -> None:
        with self._turns:
            self.engine.executor.close()

    def tokens_read(self, output: RequestOutput) -> int:
        """How many tokens of an output's prompt have been computed, or found in the prefix cache, so far."""
        request = self.engine.requests.get(output.request_id)
        if request is None:
            return len(output.prompt_token_ids)
        return max((seq.kv.computed[0] for seq in request.seqs), default=0)

    # -- driving the engine --------------------------------------------------------------------------------------------
    def _run(
        self,
        batch: Sequence[Prompt],
        settings: Sequence[SamplingParams],
        processors: tuple[Processor, ...],
        strategy: Strategy | None,
        told: Progress,
    ) -> list[RequestOutput]:
        """The outputs of a batch, once all of them are complete."""
        inbox: Inbox = deque()
        try:
            outputs = self._add_all(batch, settings, processors, strategy, inbox=inbox)
            told.start("generating", len(batch), unit="prompts")
            for delta in self._drain(outputs, inbox):
                told.advance(int(delta.finished))
        except BaseException:  # a Ctrl-C may come between the two
            self._abort(inbox)
            raise
        finally:
            told.finish()
        return outputs

    def _add_all(
        self,
        prompts: Sequence[Prompt],
        settings: Sequence[SamplingParams],
        processors: tuple[Processor, ...],
        strategy: Strategy | None,
        inbox: Inbox | None = None,
    ) -> list[RequestOutput]:
        """Queue every prompt or none; equal beginnings come next to each other, so that the prefix cache hits.

        `inbox`, if given, receives what each step adds to them.
        """
        encoded = [self._encode(prompt) for prompt in prompts]
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        outputs: dict[int, RequestOutput] = {}
        with self._turns, Uninterrupted():  # no request is queued that is not known here
            try:
                for at in sorted(range(len(encoded)), key=lambda at: encoded[at]):
                    params = settings[at]
                    if params.seed is None and self._seeds is not None:
                        params = params.replace(seed=self._seeds.getrandbits(64))
                    request = self.engine.add(encoded[at], params, processors=processors, strategy=strategy)
                    outputs[at] = empty_output(request, texts[at])
                    self._open[request.id] = (outputs[at], deque(maxlen=0) if inbox is None else inbox)
            except BaseException:
                for output in outputs.values():
                    self.engine.abort(output.request_id)
                raise
        return [outputs[at] for at in range(len(prompts))]

    def _encode_running(self, texts: Prompt | Sequence[Prompt]) -> list[Prompt]:
        """Running text is no conversation: what looks like a control token in it is text."""
        read = self.tokenizer.encode
        return [read(text, parse_special=False) if isinstance(text, str) else text for text in as_batch(texts)]

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return list(prompt)

    def _drain(
        self, outputs: list[RequestOutput], inbox: Inbox, cancelled: Callable[[], bool] | None = None
    ) -> Iterator[Delta]:
        """Step the engine until these requests are done; leaving early aborts what is left."""
        left = deque(outputs)
        try:
            while True:
                while inbox:
                    yield inbox.popleft()
                if cancelled is not None and cancelled():
                    self._abort(inbox)
                with self._turns:  # other threads' steps bring something, too: what has ended is looked at between steps
                    while left and left[0].finished:
                        left.popleft()
                    if left and not inbox:
                        self._advance(left[0])
                    elif not left and not inbox:
                        return
        finally:
            if left:
                self._abort(inbox)

    def _advance(self, output: RequestOutput) -> None:
        """One step for an output that is waited for."""
        if not self.engine.busy:
            raise RuntimeError(
                f"the engine has lost request {output.request_id}; this is a fault of Headrace, please report it"
            )
        self._step()

    def _abort(self, inbox: Inbox) -> None:
        """End what is open of the caller with this inbox, and take in the last that the engine says of it."""
        with self._turns:
            names = [name for name, (_, box) in self._open.items() if box is inbox]
            for name in names:
                self.engine.abort(name)
            try:
                for _ in range(self.engine.executor.depth):  # a step that is under way lands first, and each call lands one
                    if any(name in self._open for name in names):
                        self._step()
            finally:
                for output, _ in [self._open.pop(name) for name in names if name in self._open]:
                    output.add(Delta(output.request_id, 0, finish_reason="abort", finished=True))


def _scheduler(
    preset: str, started: Started, max_num_seqs: int, policy: str, tokens: int | None, encoder: bool
) -> SchedulerConfig:
    """A preset with another budget of tokens, or as an encoder's texts need it."""
    scheduler = SchedulerConfig.preset(preset, started.plan.max_model_len, max_num_seqs, policy)
    scheduler = scheduler if tokens is None else scheduler.with_budget(tokens)
    return scheduler.for_encoder() if encoder else scheduler


def _speculation(method: str | None, started: Started, draft_tokens: int | None, recipe: Recipe) -> Speculation | None:
    return speculation(method, started.row_invariant, started.plan.max_model_len, draft_tokens, recipe.drafter())
