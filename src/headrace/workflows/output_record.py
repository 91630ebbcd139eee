"""A finished request as JSON data, and as one line of figures."""

from typing import Any

from headrace.data.outputs import CompletionOutput, RequestOutput
from headrace.data.plan import Exited, TokenLogprob
from headrace.data.progress import counted
from headrace.text.tokenizer import Tokenizer


def record(output: RequestOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return outputs, finish_reason (of the first output), usage and error of a finished request, as JSON data.

    Log-probabilities of outputs and prompt are included if the request asked for them.
    """
    data: dict[str, Any] = {
        "outputs": [choice(answer, tokenizer) for answer in output.outputs],
        "finish_reason": "error" if output.error else output.outputs[0].finish_reason,
        "usage": usage(output),
        "error": output.error,
    }
    if output.prompt_logprobs is not None:
        data["prompt_logprobs"] = [entry and _logprob(entry, tokenizer) for entry in output.prompt_logprobs]
    return data


def usage(output: RequestOutput) -> dict[str, int]:
    """Return the tokens of the prompt, from the prefix cache (`cached_tokens`), and of all outputs together."""
    prompt, answers = len(output.prompt_token_ids), _tokens(output)
    return {
        "prompt_tokens": prompt,
        "cached_tokens": output.metrics.cached_tokens,
        "completion_tokens": answers,
        "total_tokens": prompt + answers,
    }


def speeds(output: RequestOutput) -> dict[str, float | None]:
    """Return ttft_s, seconds from arrival to the first token, and tokens_per_s of all outputs after it; None if unknown."""
    times = output.metrics
    more = _tokens(output) - len(output.outputs)
    if times.first_token is None or times.last_token is None:
        return {"ttft_s": None, "tokens_per_s": None}
    decode = times.last_token - times.first_token
    speed = round(more / decode, 2) if more > 0 and decode > 0 else None
    return {"ttft_s": round(times.first_token - times.arrival, 4), "tokens_per_s": speed}


def figures(output: RequestOutput) -> str:
    """Return one line: prompt tokens, TTFT, tokens/s; with exits also the mean layers or the smaller model's share."""
    prompt, cached = len(output.prompt_token_ids), output.metrics.cached_tokens
    measured = speeds(output)
    parts = [counted(prompt, "prompt tokens") + (f" ({cached} cached)" if cached else "")]
    if measured["ttft_s"] is not None:
        parts.append(f"TTFT {measured['ttft_s']:.2f} s")
    speed = measured["tokens_per_s"]
    parts.append(counted(_tokens(output), "tokens") + (f" at {speed:.1f} tokens/s" if speed is not None else ""))
    if exits := [exit.layers for answer in output.outputs for exit in answer.exits or []]:
        smaller = exits.count(0) / len(exits)
        parts.append(f"{smaller:.0%} by the smaller model" if smaller else f"{sum(exits) / len(exits):.1f} layers a token")
    return ", ".join(parts)


def _tokens(output: RequestOutput) -> int:
    return sum(len(answer.token_ids) for answer in output.outputs)


def choice(output: CompletionOutput, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one output of a request as JSON data, with the fields that the request asked for."""
    data: dict[str, Any] = {
        "index": output.index,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
    }
    if output.tool_calls:
        data["tool_calls"] = output.tool_calls
    if output.logprobs is not None:
        data["logprobs"] = [_logprob(entry, tokenizer) for entry in output.logprobs]
        data["cumulative_logprob"] = output.cumulative_logprob
    if output.score is not None:
        data |= {"score": output.score, "cumulative_logprob": output.cumulative_logprob}
    if output.exits is not None:
        data["exits"] = [_exit(exit, tokenizer) for exit in output.exits]
    return data


def _exit(entry: Exited, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return one exit as JSON data; `votes`, with an audit, are the texts of the exit's token and of the full model's."""
    data: dict[str, Any] = {"layers": entry.layers, "confidence": entry.confidence}
    return data | ({"votes": [tokenizer.decode([token], skip_special=False) for token in entry.votes]} if entry.votes else {})


def _logprob(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    best = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        "token": entry.token,
        "text": tokenizer.decode([entry.token], skip_special=False),
        "logprob": entry.logprob,
        "rank": entry.rank,
        "top": [{"token": id_, "text": tokenizer.decode([id_], skip_special=False), "logprob": value} for id_, value in best],
    }
