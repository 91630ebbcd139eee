"""outlines with an OpenAI-compatible server: text, a JSON schema, a regular expression through extra fields."""

import openai
import outlines
from checks import KEY, LARGE, SMALL, URL, main
from pydantic import BaseModel


class River(BaseModel):
    name: str
    length: int


CLIENT = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def text() -> None:
    assert outlines.from_openai(CLIENT, SMALL)("Name a river.", max_tokens=16)


def json_schema() -> None:
    answer = outlines.from_openai(CLIENT, LARGE)("Describe the Rhine.", River, max_tokens=60, temperature=0)
    assert isinstance(River.model_validate_json(answer), River)


def stream() -> None:
    assert len(list(outlines.from_openai(CLIENT, SMALL).stream("Name a river.", max_tokens=16))) > 2


main(text, json_schema, stream)
