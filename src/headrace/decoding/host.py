"""Draws and verifies tokens on the host from whole rows of logits, for requests with the caller's own logit processors."""

from collections.abc import Sequence as Many

import numpy as np
import torch

from headrace.data.plan import Drawn, Exited, LogitRow, TokenLogprob
from headrace.data.types import Draft, Request, Sequence
from headrace.decoding.processors import History, NoTokenError, Processor, ProcessorError
from headrace.ops.keys import key
from headrace.ops.logprobs import token_logprobs
from headrace.ops.processing import RowSpec
from headrace.ops.rejection import row_spec, verify
from headrace.ops.sampling import RowResult, reported_rows, sample
from headrace.ops.trees import paths, walk


def draw(request: Request, seq: Sequence, rows: list[bytes], births: int, logprobs: int | None) -> Drawn:
    """Run the caller's processors and then the back ends' pipeline on rows of logits, at each node that the walk reaches.

    rows: float32 [vocabulary] each, for the last known token and each node. births: outputs that start here. Raises
    ProcessorError.
    """
    draft = seq.decode.draft or Draft([], [])
    before = paths(draft.tokens, draft.parents)
    masks = b"" if seq.decode.constraint is None else seq.decode.constraint.masks(draft.tokens, draft.parents)
    width = len(masks) // (1 + len(draft.tokens))
    drawn = Drawn(())

    def draw_at(node: int) -> int | None:
        spec = RowSpec(
            params=request.params.replace(logprobs=logprobs),
            keys=[key(request.seed, seq.decode.index + i) for i in range(births)],
            tokens=seq.tokens,
            prompt_len=seq.prompt_len,
            path=before[node] if node >= 0 else [],
            stop_ids=sorted(request.stop_ids),
            mu=drawn.mus[-1] if drawn.mus else seq.decode.state,
            mask=masks[(node + 1) * width : (node + 2) * width],
        )
        try:
            result = _sample_row(request, seq, spec, rows[node + 1])
        except ProcessorError:
            if not drawn.tokens:
                raise
            return None
        drawn.tokens += tuple(result.tokens)
        drawn.logprobs += tuple(result.logprobs)
        drawn.mus += tuple(result.mus)
        return result.tokens[0]

    drawn.path = tuple(walk(draft.tokens, draft.parents, draw_at))
    return drawn


def draw_early(request: Request, seq: Sequence, answer: LogitRow, logprobs: int | None) -> Drawn:
    """The token of a row that may exit early. If the processors bar every token of the exit, the full model's row is used. An
    audit reports both tokens.

    Raises ProcessorError.
    """
    exited = seq.decode.exited
    assert exited is not None
    try:
        one: Drawn | None = draw(request, seq, [answer.row], 1, logprobs)
    except NoTokenError:
        if exited.layers > answer.layers:
            raise  # the full model has no token either
        one = None
    layers, other = exited.layers, None
    if one is None or request.params.audited:
        try:
            other = draw(request, seq, [answer.other], 1, logprobs)
        except NoTokenError:
            if one is None:
                raise
    votes = [(layers, one), (answer.layers, other)] if request.params.audited else []
    tokens = tuple(vote.tokens[0] for _, vote in sorted(votes, key=lambda pair: pair[0]) if vote is not None)
    drawn = one or other
    assert drawn is not None
    seq.decode.exited = Exited(layers if one is not None else answer.layers, exited.confidence, tokens)
    return drawn


def _sample_row(request: Request, seq: Sequence, spec: RowSpec, logits: bytes) -> RowResult:
    if not logits:
        raise ProcessorError("the step gave no logits here")
    raw = torch.from_numpy(np.frombuffer(logits, dtype="<f4").copy())[None]
    processed = apply_processors(request.processors, raw, History(request.input_ids, seq.output), [spec.path])
    if raw.isfinite().any() and not processed.isfinite().any():
        names = ", ".join(type(processor).__name__ for processor in request.processors)
        raise NoTokenError(f"logit processors ({names}) bar every token; leave one a finite logit")
    (result,) = sample(processed, [spec], raw)
    if result.error:
        raise NoTokenError(result.error)
    return result


def apply_processors(
    processors: Many[Processor],
    logits: torch.Tensor | np.ndarray,
    history: History,
    paths: Many[Many[int]] = ((),),
) -> torch.Tensor:
    """Run `processors` in order on logits [n, V] (or [V]) of one sequence; returns new float32 logits [n, V].

    paths: the draft tokens before each row. Raises ProcessorError, naming the processor, if it raises or returns anything but
    [n, V] numbers without NaN.
    """
    z = torch.tensor(np.asarray(logits, dtype=np.float32)).reshape(len(paths), -1)
    for processor in processors:
        name = type(processor).__name__
        try:
            returned = processor.apply(z.clone(), history, paths)
        except Exception as error:
            raise ProcessorError(f"logit processor {name} raised {type(error).__name__}: {error}") from error
        if not isinstance(returned, (torch.Tensor, np.ndarray)):
            raise ProcessorError(f"logit processor {name} returned {type(returned).__name__}, not the logits")
        result = torch.as_tensor(returned).float()
        if result.shape != z.shape:
            raise ProcessorError(f"logit processor {name} returned shape {list(result.shape)}, not {list(z.shape)}")
        if result.isnan().any():
            raise ProcessorError(f"logit processor {name} returned NaN")
        z = result
    return z


def verify_by_rejection(request: Request, seq: Sequence, rows: list[bytes], logprobs: int | None) -> Drawn:
    """Path, tokens and log-probabilities of a chain, by the request's rejection rule. Raises ProcessorError.

    rows: the target's logits, float32 [vocabulary], at the last known token and at each node of `seq.decode.draft`.
    """
    draft = seq.decode.draft
    assert draft is not None
    assert draft.parents == list(range(-1, len(draft.tokens) - 1)), "rejection verifies chains"
    chain = draft.tokens
    masks = b"" if seq.decode.constraint is None else seq.decode.constraint.masks(chain, draft.parents)
    width = len(masks) // (1 + len(chain))
    specs = [row_spec(request, seq, chain[:at], masks[at * width : (at + 1) * width]) for at in range(len(chain) + 1)]
    raw = torch.from_numpy(np.stack([np.frombuffer(row, dtype="<f4") for row in rows]))
    before = [list(spec.path) for spec in specs]
    z = apply_processors(request.processors, raw, History(request.input_ids, seq.output), before) if request.processors else raw
    accepted, token = verify(z, specs, chain, draft.q)
    if token is None and not accepted:
        raise ProcessorError(
            "no token can be drawn: the logits are not finite, or the constraints together exclude every token"
        )
    tokens = chain[:accepted] if token is None else [*chain[:accepted], token]
    drawn = Drawn(tuple(tokens), tuple(range(len(tokens) - 1)))
    if logprobs is not None:
        drawn.logprobs = tuple(_report(raw, z, specs, tokens, logprobs))
    return drawn


def _report(raw: torch.Tensor, z: torch.Tensor, specs: list[RowSpec], tokens: list[int], k: int) -> list[TokenLogprob]:
    """Log-probabilities of the tokens, from raw or processed logits as the request asks."""
    rows = reported_rows(raw, z, specs)
    return token_logprobs(rows[: len(tokens)].float(), torch.tensor(tokens), k)
