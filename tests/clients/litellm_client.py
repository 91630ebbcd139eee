"""litellm: completion, streaming, tools, and errors under their own classes."""

import litellm
from checks import KEY, LARGE, SMALL, URL, main

ASK = [{"role": "user", "content": "Name a river."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def complete(model: str = SMALL, **more: object) -> object:
    return litellm.completion(model=f"openai/{model}", messages=ASK, api_base=URL, api_key=KEY, max_tokens=24, **more)


def completion() -> None:
    answer = complete(temperature=0)
    assert answer.choices[0].message.content  # type: ignore[attr-defined]
    assert answer.usage.completion_tokens > 0  # type: ignore[attr-defined]


def streaming() -> None:
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def tools() -> None:
    answer = complete(LARGE, tools=[TOOL], tool_choice="required", temperature=0)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_time"  # type: ignore[attr-defined]


def errors() -> None:
    for more, kind in (({"temperature": -3}, litellm.BadRequestError), ({"model": "nowhere"}, litellm.NotFoundError)):
        try:
            complete(**more)
        except kind:
            continue
        raise AssertionError(f"{more}: no {kind.__name__}")


main(completion, streaming, tools, errors)
