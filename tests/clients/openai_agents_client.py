"""openai-agents: an agent with a tool through /v1/responses and through chat completions."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import KEY, LARGE, URL, main, of_model
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CALLED: list[str] = []


class River(BaseModel):
    name: str


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    CALLED.append(city)
    return f"It is sunny in {city}."


def agent(kind: type, **more: object) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)  # of this event loop
    settings = ModelSettings(temperature=0, max_tokens=64, **more.pop("settings", {}))
    return Agent(name="a", instructions="Be short.", model=kind(LARGE, client), model_settings=settings, **more)


async def chat_completions() -> None:
    assert (await Runner.run(agent(OpenAIChatCompletionsModel), "Name a river.")).final_output


async def responses() -> None:
    assert (await Runner.run(agent(OpenAIResponsesModel), "Name a river.")).final_output


async def streamed_responses() -> None:
    result = Runner.run_streamed(agent(OpenAIResponsesModel), "Name a river.")
    assert len([event async for event in result.stream_events()]) > 2
    assert result.final_output


async def tool_required() -> None:
    CALLED.clear()
    one = agent(OpenAIResponsesModel, tools=[get_weather], settings={"tool_choice": "required"})
    await Runner.run(one, "What is the weather in Paris?")  # a weak model says nothing after the result
    assert CALLED


async def typed() -> None:
    result = await Runner.run(agent(OpenAIResponsesModel, output_type=River), "Name a river.")
    assert isinstance(result.final_output, River)


@of_model("answers without calling the tool")
async def tool_auto() -> None:
    CALLED.clear()
    await Runner.run(agent(OpenAIChatCompletionsModel, tools=[get_weather]), "What is the weather in Paris? Use the tool.")
    assert CALLED


main(chat_completions, responses, streamed_responses, tool_required, typed, tool_auto)
