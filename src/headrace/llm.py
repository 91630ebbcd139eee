"""`LLM`: the Python API. It opens a model, plans memory, owns an engine, and returns outputs of prompts."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from headrace.audio.channels import sound_files
from headrace.audio.mel import Samples
from headrace.audio.together import Event, run_together
from headrace.audio.transcript import Segment, Transcript
from headrace.audio.transcription import SpeechSettings, Transcription
from headrace.audio.wav import Sound
from headrace.backends.recipe import Recipe
from headrace.data.explicit import (
    Messages,
    Params,
    PlainPrompt,
    Prompt,
    as_batch,
    as_conversations,
    as_prompt,
    check_variables,
    only_known,
    params_for_prompts,
    template_variables,
)
from headrace.data.fields import ParamError
from headrace.data.outputs import Classification, CompletionOutput, Embedding, RankedDocument, RequestOutput, Score, whole
from headrace.data.params import SamplingParams
from headrace.data.plan import Threshold
from headrace.data.progress import Moving, Progress, on_terminal, waiting
from headrace.data.settings import DEFERRED, ModelSettings
from headrace.data.types import Delta
from headrace.decoding.base import Strategy
from headrace.decoding.constraint_check import extract_calls
from headrace.decoding.processors import Processor
from headrace.decoding.prompts import Classifying, Pooling, Scoring
from headrace.decoding.tools import ToolChoice, conversation, tooling
from headrace.drafting.methods import speculation
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.lockstep import Inbox, Lockstep
from headrace.parallel.engine import make_engine
from headrace.parallel.pipeline.opening import last_stage
from headrace.startup.adapters import open_adapters
from headrace.startup.backend import start
from headrace.startup.classifier import Pair, encode_texts, load, require_classifier
from headrace.startup.kv_store import check_kv_store, open_kv_store
from headrace.startup.loading import open_files, open_roles, pick_device
from headrace.startup.speech import speech_model, voice_detector
from headrace.text.chat import (
    ChatTemplate,
    TemplateError,
    check_continues,
    render_open,
    split_template_kwargs,
    validate_messages,
)
from headrace.weights.defaults import values
from headrace.weights.ranking import NO_RANKER

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "Score"]

log = logging.getLogger("headrace")


class LLM:
    """An open model in this process, with its tokenizer, KV cache and engine.

    model: catalog name, .gguf file, folder with safetensors, or hub id. The keywords are the fields of
    `headrace.data.settings.ModelSettings`; docs/en/reference/settings.md lists them.
    - Numbers: `dtype` (any but auto and bfloat16 runs in torch), `kv_dtype` of the KV cache, `quantize` (int8 or int4 of float
      weights at load, native back end) and `activations` (rounding of the inputs of integer weights).
    - Memory: `kv_cache_memory` in bytes or as "2GiB", `max_model_len` in tokens. `rope="yarn:4"` extends the context.
    - Disk: `kv_store`, a folder that keeps K/V of long prompts for the next start, of at most `kv_store_size` (8GiB).
    - Other models of the same vocabulary: `draft` (or a folder of heads), `amateur`, `cascade`. Folders: `classifier`, `exits`.
    - LoRA: `adapter`, NAME=PATH separated by commas, used by `generate(…, adapter=NAME)`.
    - Speculation: `speculate` (auto, ngram, suffix, lookahead, jacobi, draft, heads, self, blocks, None) chooses the drafter;
      `draft_tokens` are drafted at once.
    - Several processes, with `threads` each and the same outputs: `tp` (2, 4 or 8) divides each layer; `pp` runs consecutive
      layers in each process, as many as `stages` ("14,16") says; `stage_hosts` ("10.0.0.2:9200") and `key_file` run the first
      ones on other hosts.
    - `parse_special`: control tokens inside messages are parsed; for trusted content only.

    Outputs depend on the request and its seed alone: bitwise on the native core, near-tie-exact in torch.
    `verification="rejection"` and "block" draw other samples of the same distribution. Raises ValueError.
    """

    settings: ModelSettings

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        backend: str = "auto",
        threads: int | None = None,
        pp: int = 1,
        stages: str | None = None,
        stage_hosts: str | None = None,
        key_file: str | Path | None = None,
        max_model_len: int | None = None,
        rope: str | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        kv_cache_memory: int | str | None = None,
        kv_dtype: str = "auto",
        kv_store: str | Path | None = None,
        kv_store_size: int | str | None = None,
        quantize: str | None = None,
        activations: str = "auto",
        enable_prefix_caching: bool = True,
        seed: int | None = None,
        preset: str = "offline",
        policy: str = "continuous",
        draft: str | Path | None = None,
        amateur: str | Path | None = None,
        speculate: str | None = "auto",
        draft_tokens: int | None = None,
        draft_vocab: int | None = None,
        classifier: str | Path | None = None,
        exits: str | Path | None = None,
        exit_state: str = DEFERRED,
        exit_layers: str | None = None,
        cascade: str | Path | None = None,
        tp: int = 1,
        adapter: str | None = None,
        max_lora_rank: int = 64,
        offload: bool = False,
        parse_special: bool = False,
        progress: Progress | None = None,
    ) -> None:
        given = locals()
        self._open(model, ModelSettings(**{name: given[name] for name in ModelSettings.__struct_fields__}), progress)

    @classmethod
    def from_settings(
        cls,
        model: str | Path,
        settings: ModelSettings,
        *,
        progress: Progress | None = None,
        shared_weights: int | None = None,
    ) -> Self:
        """Open a model with settings that are already one object. shared_weights: as in `Recipe`. Raises ValueError."""
        llm = cls.__new__(cls)
        llm._open(model, settings, progress, shared_weights)
        return llm

    def _open(
        self, model: str | Path, settings: ModelSettings, progress: Progress | None, shared_weights: int | None = None
    ) -> None:
        self.progress = on_terminal() if progress is None else progress
        with waiting(self.progress, f"loading {Path(model).name}"):
            self.device = pick_device(settings.device)
            self.opened = open_files(model, progress, parse_special=settings.parse_special, rope=settings.rope)
            self.classifier = None if settings.classifier is None else load(settings.classifier, self.opened)
            _ = self.opened.ranker  # its head is checked before the weights are read
            self.settings = replace(settings, device=self.device)
            check_kv_store(settings, self.opened.config)
            roles = open_roles(self.opened, settings, progress)
            adapters = open_adapters(self.opened, settings)
            recipe = Recipe(roles, self.settings, self.progress, shared_weights=shared_weights, adapters=adapters)
            if settings.pp != 1 or settings.stages or settings.stage_hosts:
                recipe = last_stage(recipe)
                self.settings = recipe.settings
            started = start(recipe)
        self.tokenizer, self.model_config, self.memory_plan = self.opened.tokenizer, self.opened.config, started.plan
        self.runner, self.backend, self.dtype, self.exactness = started.runner, started.name, started.dtype, started.exactness
        self.engine = self._engine(started.recipe, started.row_invariant)
        self.callers = Lockstep(self.engine, self.tokenizer.encode, settings.seed)

    @classmethod
    def from_pretrained(cls, model: str | Path, **settings: Any) -> Self:
        """`LLM(model, …)` under transformers' name. Raises TypeError for an unknown setting, with the most similar name."""
        return cls(model, **only_known(settings, cls.__init__))

    # -- requests ------------------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        processors: Sequence[Processor] = (),
        strategy: Strategy | None = None,
        **settings: Any,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts (texts or token ids), in their order.

        params (or sampling_params): one for all prompts or one each, default `SamplingParams()`. settings: single fields
        (max_tokens=48) that replace theirs. The chat template and the model's own settings are not applied.
        strategy: one object for the whole batch; it keeps its state in request.state and seq.decode.state.

        A request that fails while it runs has `error` set and finish_reason "error". Raises AdmissionError, before anything
        runs, for one that could never run. Several threads may call at once; their requests run together.
        """
        batch = as_batch(prompts)
        each = params_for_prompts(len(batch), params, sampling_params, settings)
        progress = self.progress if len(batch) > 1 and isinstance(self.progress, Moving) else Progress()
        return self._run(batch, each, tuple(processors), strategy, progress)

    def chat(
        self,
        messages: str | Messages | Sequence[str | Messages],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        **more: Any,
    ) -> list[RequestOutput]:
        """Generate answers to conversations, with the model's chat template.

        messages: [{"role": …, "content": …}, …], a text of the user, or a list of these. params: default `default_params()`.
        more: single settings (max_tokens=48) and variables that the template reads (enable_thinking=False); other variables go
        into chat_template_kwargs. continue_final_message: the answer continues the last message, the assistant's.
        tools, tool_choice, parallel_tool_calls: as in the server; calls fit their schemas and are in an output's `tool_calls`.
        chat_template, parse_special: as in `render`. Raises ToolError, TemplateError, TypeError.
        """
        given_to_template, name = split_template_kwargs(chat_template_kwargs, chat_template)
        called = bool(tools) and tool_choice != "none"
        chosen = self.opened.template.choose(name, tools=called, parse_special=parse_special)
        source, template = chosen.source, template_variables(more, chosen.reads)
        settings = {name: value for name, value in more.items() if name not in template}
        template = {**given_to_template, **template, "continue_final_message": continue_final_message}
        talks = [validate_messages(talk) for talk in as_conversations(messages)]
        if continue_final_message:
            check_continues(talks)
        each = params_for_prompts(len(talks), params, sampling_params, settings, self._own())
        asked = ToolChoice(None if tools is None else [dict(tool) for tool in tools], tool_choice, parallel_tool_calls)
        given = tooling(asked, source, self.tokenizer.control_id)
        if given is not None:
            each = [given.held(one) for one in each]
            template |= given.template_variables(source)
        talks = [conversation(self.opened.with_system(talk), given, source) for talk in talks]
        outputs = self.generate([self._rendered(chosen, talk, **template) for talk in talks], each)
        if given is not None:
            for output in outputs:
                extract_calls(output, given)
        return outputs

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        processors: Sequence[Processor] = (),
        output: list[RequestOutput] | None = None,
        cancelled: Callable[[], bool] | None = None,
        **settings: Any,
    ) -> Iterator[Delta]:
        """Generate the output of one prompt and yield its deltas. Parameters are those of `generate`.

        Closing the iterator aborts the request. output: a list that receives the RequestOutput, which is filled meanwhile.
        cancelled: called between steps; True ends the request with finish_reason "abort".
        """
        inbox: Inbox = deque()
        each = params_for_prompts(1, params, sampling_params, settings)
        (made,) = self.callers.add_all([as_prompt(prompt)], each, tuple(processors), None, inbox=inbox)
        if output is not None:
            output.append(made)
        yield from self.callers.drain([made], inbox, cancelled)

    def add(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        processors: Sequence[Processor] = (),
        strategy: Strategy | None = None,
        **settings: Any,
    ) -> RequestOutput:
        """Queue one prompt. Each `step` adds to the returned output."""
        each = params_for_prompts(1, params, sampling_params, settings)
        return self.callers.add_all([as_prompt(prompt)], each, tuple(processors), strategy)[0]

    def step(self) -> list[RequestOutput]:
        """Run one engine step for all queued prompts. Returns the outputs that ended in it."""
        return self.callers.step()

    def score(self, texts: Prompt | Sequence[Prompt], *, start: int | Sequence[int] = 0, adapter: str = "") -> list[Score]:
        """Log-probability of every token of each text, given those before it.

        start: score from this token on, one number for all texts or one each; earlier tokens may come from the prefix cache.
        adapter: name of the adapter to use. Raises ParamError and AdmissionError.
        """
        batch = self._encode_running(texts)
        starts = [start] * len(batch) if isinstance(start, int) else list(start)
        if len(starts) != len(batch):
            raise ParamError("start", f"start has {len(starts)} numbers for {len(batch)} texts; give one, or one for each")
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, adapter=adapter or None)
        each = [scoring.replace(prompt_logprobs_start=at) for at in starts]
        return [Score.of(output) for output in whole(self._run(batch, each, (), Scoring(), Progress()))]

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        adapter: str | None = None,
    ) -> list[Embedding]:
        """Embeddings of texts, vectors of length 1.

        pooling: mean, last, or (encoders) first; default: the model's own, last for decoders. dimensions: number of leading
        values to keep, for models that were trained for it. prompt_name: a prompt of the model (query, document, …) that stands
        before each text; default: the model's own default. adapter: name of the adapter to use. Raises ValueError.
        """
        sentence = self.opened.sentence
        sentence.check_dimensions(dimensions, self.model_config.hidden_size)
        batch, pool = sentence.with_prompt(as_batch(texts), prompt_name), pooling or sentence.pooling
        outputs = self._pooled(batch, Pooling(pool), adapter)
        return [sentence.embedding(output.prompt_token_ids, output.pooled, pool, dimensions) for output in outputs]

    def rank(self, query: str, documents: Sequence[str], *, top_n: int | None = None) -> list[RankedDocument]:
        """Rank documents by their relevance to a query, best first; the `top_n` best ones, or all.

        For rerankers: cross-encoders with one label, and Qwen3-Reranker. Scores are those of sentence-transformers, usually
        from 0 to 1. Raises ValueError.
        """
        if (ranker := self.opened.ranker) is None:
            raise ValueError(NO_RANKER)
        pairs = ranker.pairs(query, documents, top_n, partial(self.tokenizer.encode, add_special=False, parse_special=False))
        pooled = [output.pooled for output in self._pooled(pairs, Pooling(ranker.pooling))]
        return [RankedDocument(index, score, pairs[index]) for index, score in ranker.ranked(pooled, pairs, top_n)]

    def classify(
        self, texts: Prompt | Sequence[Prompt | Pair], *, criterion: str | None = None, threshold: Threshold | None = None
    ) -> list[Classification]:
        """Classify texts, or pairs of texts (tuples), with early exit.

        The first exit whose confidence passes the threshold gives the class or number. criterion: max_prob, margin, entropy, kl
        or patience, "off" for no early exit; default: the calibrated threshold with the fewest layers. threshold: a number, or
        one for each exit but the last; default: the calibrated one of the criterion. Raises ValueError.
        """
        known = require_classifier(self.classifier)
        ids = encode_texts(lambda text: self.tokenizer.encode(text, parse_special=False), texts)
        outputs = self._pooled(ids, Classifying(*known.rule(criterion, threshold)))
        return [known.classification(output.prompt_token_ids, output.classified) for output in outputs]

    def transcribe(self, sound: Sound, *, rate: int | None = None, **settings: Any) -> Transcript:
        """Transcribe sound with a speech model.

        sound: a file (WAV; others need the extra `audio`), its bytes, or samples (int16, floats in [-1, 1]) with their `rate`.
        settings: `channels` (mix, or split for each alone), `partial` (use a cut or damaged file up to there), and fields of
        `headrace.audio.transcription.SpeechSettings` (language, long, vad, …). Raises AudioError, LanguageError, ValueError.
        """
        *_, (_, last) = self.transcribe_all([sound], rate=rate, **settings)
        if isinstance(last, Transcript):
            return last
        raise last if isinstance(last, Exception) else RuntimeError("a transcription without an end: please report this fault")

    def transcribe_stream(self, sound: Sound, *, rate: int | None = None, **settings: Any) -> Iterator[Segment]:
        """Transcribe sound as `transcribe` does, and yield each segment as its window ends. Closing the iterator ends it."""
        for _, event in self.transcribe_all([sound], rate=rate, **settings):
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Segment):
                yield event

    def transcribe_all(
        self, sounds: Iterable[Sound], *, rate: int | None = None, together: int = 8, **settings: Any
    ) -> Iterator[tuple[int, Event]]:
        """Transcribe several sounds, `together` windows at a time. Yields segments with the number of their sound; the last
        event of a sound is its Transcript, or the error that ended it. Raises ValueError, TypeError."""
        return run_together(self.callers, sound_files(sounds, rate, self._transcription, **settings), together)

    def _transcription(self, samples: Samples, settings: SpeechSettings) -> Transcription:
        audio, speech = speech_model(self.opened)
        detector, context = voice_detector() if settings.vad else None, self.memory_plan.max_model_len
        return Transcription(samples, None, speech, self.tokenizer, audio, context, settings, detector)

    def _pooled(self, texts: Prompt | Sequence[Prompt], strategy: Strategy, adapter: str | None = None) -> list[RequestOutput]:
        """Run texts with a strategy that generates nothing."""
        batch = self._encode_running(texts)
        return whole(self._run(batch, [SamplingParams(max_tokens=1, adapter=adapter)] * len(batch), (), strategy, Progress()))

    def render(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parse_special: bool = False,
        **template: Any,
    ) -> list[int]:
        """Token ids of a conversation up to the start of a new answer.

        template: variables that the chat template reads; others go into chat_template_kwargs. With continue_final_message the
        ids end with the last message's text. chat_template: name of one of the model's templates; default: "tool_use" if there
        are tools and it exists, otherwise "default". Control tokens inside messages, tool results, arguments and documents are
        text; parse_special parses them, for trusted content only. Raises TemplateError without a template, or if the
        conversation cannot be continued; TypeError for a variable that the template does not read.
        """
        given_to_template, name = split_template_kwargs(chat_template_kwargs, chat_template)
        chosen = self.opened.template.choose(name, tools=template.get("tools") is not None, parse_special=parse_special)
        check_variables(template, chosen.reads)
        return self._rendered(chosen, messages, **{**given_to_template, **template})

    def _rendered(
        self, chosen: ChatTemplate, messages: Messages, *, continue_final_message: bool = False, **template: Any
    ) -> list[int]:
        if continue_final_message and template.get("add_generation_prompt"):
            raise TemplateError(
                "continue_final_message opens no new turn; leave add_generation_prompt out", "continue_final_message"
            )
        template = {"add_generation_prompt": not continue_final_message, **template}
        apply = partial(chosen.render_marked, **template)
        text = render_open(messages, apply) if continue_final_message else apply(messages)
        return self.tokenizer.encode(text, add_special=False, marked=chosen.marks)

    def default_params(self, **changes: Any) -> SamplingParams:
        """Default parameters of conversations, with changes.

        They come from the model, else its family, else temperature 0.8, top_k 40, top_p 0.95, min_p 0.05. The answer has no
        length limit but the context. Raises TypeError and ParamError.
        """
        return params_for_prompts(1, None, None, changes, self._own())[0]

    def _own(self) -> dict[str, Any]:
        return {"max_tokens": None, **values(self.opened.defaults)}

    @contextmanager
    def speculating(self, speculation: Speculation | None) -> Iterator[None]:
        """Draft with `speculation` (None: not at all) inside the `with` block, and as before after it. For an idle engine."""
        before = self.engine.speculation
        self.engine.speculation = speculation
        try:
            yield
        finally:
            self.engine.speculation = before

    def close(self) -> None:
        """Release the model; `with LLM(…) as llm:` does it at the end of the block. A second call has no effect.

        Later calls raise ClosedError (a RuntimeError), and so do other threads' open requests.
        """
        self.callers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        config, plan = self.model_config, self.memory_plan
        return f"LLM({self.opened.name!r}, {config.architecture}, {self.backend} in {self.dtype}, context {plan.max_model_len})"

    # -- engine --------------------------------------------------------------------------------------------------------
    def _engine(self, recipe: Recipe, invariant: bool) -> Engine:
        plan, settings = self.memory_plan, self.settings
        drafts = speculation(settings.speculate or None, invariant, plan.max_model_len, settings.draft_tokens, recipe.drafter())
        log.info("%s; %s (%s) on %s, %s", plan.summary, self.backend, self.exactness, self.device, self.dtype)
        self.runner.exits = None if self.classifier is None else self.classifier.exits
        engine = make_engine(recipe, self.runner, plan, drafts)
        engine.scheduler.store = open_kv_store(recipe, self.runner, engine.blocks, f"{self.backend} {self.dtype}")
        return engine

    def _run(
        self,
        batch: Sequence[PlainPrompt],
        settings: Sequence[SamplingParams],
        processors: tuple[Processor, ...],
        strategy: Strategy | None,
        progress: Progress,
    ) -> list[RequestOutput]:
        """Run a batch to its end."""
        inbox: Inbox = deque()
        try:
            outputs = self.callers.add_all(batch, settings, processors, strategy, inbox=inbox)
            progress.start("generating", len(batch), unit="prompts")
            for delta in self.callers.drain(outputs, inbox):
                progress.advance(int(delta.finished))
        except BaseException:  # Ctrl-C, too
            self.callers.abort(inbox)
            raise
        finally:
            progress.finish()
        return outputs

    def _encode_running(self, texts: Prompt | Sequence[Prompt]) -> list[PlainPrompt]:
        """Encode texts without parsing control tokens in them."""
        return [self.tokenizer.encode(text, parse_special=False) if isinstance(text, str) else text for text in as_batch(texts)]
