"""pydantic-ai: text, typed output by tools and by JSON schema, a tool, streaming."""

from checks import KEY, LARGE, URL, main, of_model
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0, "max_tokens": 64}


class River(BaseModel):
    name: str


def agent(**more: object) -> Agent:
    model = OpenAIChatModel(LARGE, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, model_settings=SETTINGS, retries=0, **more)


def text() -> None:
    assert agent().run_sync("Name a river.").output


def typed_by_tool() -> None:
    assert isinstance(agent(output_type=River).run_sync("Name a river.").output, River)


def typed_by_schema() -> None:
    assert isinstance(agent(output_type=NativeOutput(River)).run_sync("Name a river.").output, River)


async def streamed() -> None:
    async with agent().run_stream("Name a river.") as result:
        assert len([part async for part in result.stream_text(delta=True, debounce_by=None)]) > 1


@of_model("answers without calling the tool")
def tool() -> None:
    called = []
    one = agent()

    @one.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return f"It is sunny in {city}."

    one.run_sync("What is the weather in Paris? Use the tool.")
    assert called


main(text, typed_by_tool, typed_by_schema, streamed, tool)
