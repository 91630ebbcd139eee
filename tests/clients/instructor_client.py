"""instructor: typed answers by tools, by JSON schema and by JSON mode."""

import instructor
from checks import KEY, LARGE, URL, main, of_model
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


ASK = [{"role": "user", "content": "Jason is 25 years old."}]


def request_person(mode: instructor.Mode) -> Person:
    client = instructor.from_openai(OpenAI(base_url=URL, api_key=KEY), mode=mode)
    return client.chat.completions.create(
        model=LARGE, messages=ASK, response_model=Person, max_retries=0, max_tokens=80, temperature=0
    )


def tools() -> None:
    assert isinstance(request_person(instructor.Mode.TOOLS), Person)


def json_schema() -> None:
    assert isinstance(request_person(instructor.Mode.JSON_SCHEMA), Person)


@of_model("JSON mode names no keys to the grammar: a weak model writes others")
def json_mode() -> None:
    assert isinstance(request_person(instructor.Mode.JSON), Person)


@of_model("reads the wrong name or age")
def right_values() -> None:
    assert request_person(instructor.Mode.JSON_SCHEMA) == Person(name="Jason", age=25)


main(tools, json_schema, json_mode, right_values)
