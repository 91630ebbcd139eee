"""llama-index with OpenAILike: complete, chat, stream, typed output."""

from checks import KEY, LARGE, SMALL, URL, main
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class River(BaseModel):
    name: str


def model(name: str = SMALL, **more: object) -> OpenAILike:
    given = {"is_chat_model": True, "context_window": 2048, "max_tokens": 24, "temperature": 0, **more}
    return OpenAILike(model=name, api_base=URL, api_key=KEY, max_retries=0, **given)


def complete() -> None:
    assert model(is_chat_model=False).complete("The river").text


def chat() -> None:
    assert model().chat([ChatMessage(role="user", content="Name a river.")]).message.content


def stream() -> None:
    assert len(list(model().stream_chat([ChatMessage(role="user", content="Name a river.")]))) > 2


def typed() -> None:
    llm = model(LARGE, is_function_calling_model=True).as_structured_llm(River)
    assert isinstance(llm.complete("Name a river.").raw, River)


main(complete, chat, stream, typed)
