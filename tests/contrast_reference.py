"""Contrastive decoding and contrastive search as their papers say, without a cache: everything is computed anew each step."""

import math
from functools import lru_cache

import torch

from headrace.data.params import SamplingParams
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.ops.keys import key
from headrace.ops.sampling import RowSpec, sample


def may_come(token: int, tokens: list[int], prompt_len: int, params: SamplingParams) -> bool:
    """Whether a list, banned words or a rule against repetition let a token come next."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    n = params.no_repeat_ngram
    longer = [*tokens, token]
    if n and longer[-n:] in [tokens[at : at + n] for at in range(len(tokens) - n + 1)]:
        return False
    return not any(longer[-len(word) :] == list(word) for word in params.bad_words or ())


def forward(model: Model, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] and final hidden states [n, hidden] of a whole text; once for each text."""
    return _forward(model, tuple(tokens))


@lru_cache(maxsize=1024)
@torch.no_grad()
def _forward(model: Model, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    pool = KVPool(model.config, 1, len(tokens), next(model.parameters()).dtype)
    ctx = build(pool, [FeedRows(list(tokens), [0])])
    x = model.embed(ctx)
    for i in range(model.config.num_layers):
        x = model.layer(i, x, ctx)
    return model.head(x), model.final(x)


def contrastive_decoding(expert: Model, amateur: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    """Draws from p_e * (p_e / p_a) ** beta over {p_e >= alpha * max p_e}, with the request's noise; the largest is that of the
    tokens that may come."""
    tokens = list(prompt)
    beta, alpha = params.contrastive_beta or 0.0, params.contrastive_alpha
    for _ in range(params.max_tokens or 0):
        e, a = (forward(model, tokens)[0][-1].double().log_softmax(-1) for model in (expert, amateur))
        may = [token for token in range(len(e)) if may_come(token, tokens, len(prompt), params)]
        scores = torch.where(e >= math.log(max(alpha, 1e-300)) + e[may].max(), (1 + beta) * e - beta * a, -torch.inf)
        spec = RowSpec(params=params, keys=[key(params.seed or 0, 0)], tokens=tokens, prompt_len=len(prompt), stop_ids=[])
        (result,) = sample(scores[None], [spec])
        tokens.append(result.tokens[0])
    return tokens[len(prompt) :]


def chosen(own: torch.Tensor, amateur: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Of two rows of logits the one that a speculative cascade takes."""
    p, q, at = own.softmax(-1), amateur.softmax(-1), params.defer_at
    apart = float(torch.clamp(p - q, min=0).sum())  # the total variation
    bar = 1 - at if params.defer_rule == "chow" else float(p.max()) - at * apart
    return amateur if float(q.max()) >= bar else own


def speculative_cascade(own: Model, amateur: Model, prompt: list[int], params: SamplingParams) -> list[int]:
    """Each token by the model that its rule names, with the request's noise."""
    tokens = list(prompt)
    for _ in range(params.max_tokens or 0):
        rows = (forward(model, tokens)[0][-1].double() for model in (own, amateur))
        spec = RowSpec(params=params, keys=[key(params.seed or 0, 0)], tokens=tokens, prompt_len=len(prompt), stop_ids=[])
        (result,) = sample(chosen(*rows, params)[None], [spec])  # type: ignore[call-arg]
        tokens.append(result.tokens[0])
    return tokens[len(prompt) :]


def contrastive_search(model: Model, prompt: list[int], params: SamplingParams, first: int = 0) -> list[int]:
    """Of the k likeliest tokens the one with the largest (1 - a) * p - a * max cosine with the tokens from `first` on."""
    tokens = list(prompt)
    alpha = params.penalty_alpha
    for count in range(params.max_tokens or 0):
        logits, hidden = forward(model, tokens)
        likely = logits[-1].double().softmax(-1)
        if count < params.min_tokens:
            likely[list(params.stop_token_ids)] = 0
        probs, candidates = likely.topk(params.top_k)
        scores = []
        for p, token in zip(probs.tolist(), candidates.tolist(), strict=True):
            vector = forward(model, [*tokens, token])[1][-1:].double()
            near = torch.cosine_similarity(hidden[first:].double(), vector).max()
            scores.append((1 - alpha) * p - alpha * float(near))
        tokens.append(candidates.tolist()[scores.index(max(scores))])
        if tokens[-1] in params.stop_token_ids and count >= params.min_tokens:
            break
    return tokens[len(prompt) :]
