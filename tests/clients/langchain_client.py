"""langchain-openai: invoke, stream, batch, tools and structured output."""

from checks import KEY, LARGE, SMALL, URL, main, of_model
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class River(BaseModel):
    name: str
    length_km: int


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(name: str = SMALL) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=URL, api_key=KEY, max_tokens=24, temperature=0, max_retries=0)


def invoke() -> None:
    answer = model().invoke("Name a river.")
    assert answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    chunks = list(model().stream("Name a river."))
    assert len(chunks) > 2
    assert "".join(str(chunk.content) for chunk in chunks) == model().invoke("Name a river.").content


def batch() -> None:
    assert len(model().batch(["Name a river.", "Name a lake."])) == 2


async def asynchronous() -> None:
    assert (await model().ainvoke("Name a river.")).content


def tool_choice() -> None:
    bound = ChatOpenAI(model=LARGE, base_url=URL, api_key=KEY, max_tokens=60, temperature=0).bind_tools(
        [get_weather], tool_choice="get_weather"
    )
    (call,) = bound.invoke("What is the weather in Paris?").tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["city"], str)


@of_model("answers without a call")
def tool_auto() -> None:
    bound = ChatOpenAI(model=LARGE, base_url=URL, api_key=KEY, max_tokens=60, temperature=0).bind_tools([get_weather])
    (call,) = bound.invoke("What is the weather in Paris? Use the tool.").tool_calls
    assert call["name"] == "get_weather"


def structured_output() -> None:
    llm = ChatOpenAI(model=LARGE, base_url=URL, api_key=KEY, max_tokens=60, temperature=0)
    assert isinstance(llm.with_structured_output(River, method="json_schema").invoke("Describe the Rhine."), River)


main(invoke, stream, batch, asynchronous, tool_choice, tool_auto, structured_output)
