"""An answer as data (JSON) and as one line of figures."""

from typing import Any

from headrace.data.outputs import CompletionOutput, RequestOutput
from headrace.data.plan import Exited, TokenLogprob
from headrace.data.progress import counted
from headrace.text.tokenizer import Tokenizer


def record(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """outputs, finish_reason (of the first output), usage and error of a finished request, as plain JSON data.

    Log-probabilities, of outputs or prompt, are there where they were asked for.
    """
    found: dict[str, Any] = {
        "outputs": [choice(one, tokenizer) for one in output.outputs],
        "finish_reason": "error" if output.error else output.outputs[0].finish_reason,
        "usage": usage(output),
        "error": output.error,
    }
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [entry and _logprob(entry, tokenizer) for entry in output.prompt_logprobs]
    return found


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of the prompt (`cached_tokens`: those that were not computed again) and of all outputs together."""
    prompt, answers = len(output.prompt_token_ids), _tokens(output)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": output.metrics.cached_tokens,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
    }


def speeds(output: RequestOutput) -> dict[str, float | None]:
    """ttft_s: from asking to the first token; tokens_per_s: of all outputs, after it; None where it has not happened."""
    times = output.metrics
    more = _tokens(output) - len(output.outputs)
    if times.first_token is None or times.last_token is None:
        return {"ttft_s": None, "tokens_per_s": None}
    decode = times.last_token - times.first_token
    speed = round(more / decode, 2) if more > 0 and decode > 0 else None
    return {"ttft_s": round(times.first_token - times.arrival, 4), "tokens_per_s": speed}


def figures(output: RequestOutput) -> str:
    """One line: prompt tokens, TTFT, tokens/s; of tokens that may leave early, how deep or by whom they were written."""
    prompt, cached = len(output.prompt_token_ids), output.metrics.cached_tokens
    found = speeds(output)
    parts = [counted(prompt, "prompt tokens") + (f" ({cached} cached)" if cached else "")]
    if found["ttft_s"] is not None:
        parts.append(f"TTFT {found['ttft_s']:.2f} s")
    speed = found["tokens_per_s"]
    parts.append(counted(_tokens(output), "tokens") + (f" at {speed:.1f} tokens/s" if speed is not None else ""))
    if exits := [one.layers for each in output.outputs for one in each.exits or []]:
        smaller = exits.count(0) / len(exits)
        parts.append(f"{smaller:.0%} by the smaller model" if smaller else f"{sum(exits) / len(exits):.1f} layers a token")
    return ", ".join(parts)


def _tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def choice(output: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """One of a request's outputs as plain JSON data; what was not asked for is not there."""
    found: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.tool_calls:
        found["tool_calls"] = output.tool_calls
    if output.logprobs is not None:
        found["logprobs"] = [_logprob(entry, tokenizer) for entry in output.logprobs]
        found["cumulative_logprob"] = output.cumulative_logprob
    if output.score is not None:
        found |= {"score": output.score, "cumulative_logprob": output.cumulative_logprob}
    if output.exits is not None:
        found["exits"] = [_exit(one, tokenizer) for one in output.exits]
    return found


def _exit(entry: Exited, tokenizer: Tokenizer) -> dict[str, Any]:
    """`votes`, under an audit: the exit's token and the whole model's."""
    found: dict[str, Any] = {"layers": entry.layers, "confidence": entry.confidence}
    return found | ({"votes": [tokenizer.decode([token], skip_special=False) for token in entry.votes]} if entry.votes else {})


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    best = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        "token": entry.token,
        "text": tokenizer.decode([entry.token], skip_special=False),
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [{"token": id_, "text": tokenizer.decode([id_], skip_special=False), "logprob": value} for id_, value in best],
    }
