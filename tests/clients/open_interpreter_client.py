"""open-interpreter: a conversation whose second request ends with a message of the assistant. No code is run."""

from checks import KEY, LARGE, URL, main
from interpreter import OpenInterpreter


def interpreter() -> OpenInterpreter:
    made = OpenInterpreter(disable_telemetry=True, offline=True, auto_run=False)
    made.llm.model, made.llm.api_base, made.llm.api_key = f"openai/{LARGE}", URL, KEY
    made.llm.supports_functions = False
    made.llm.context_window, made.llm.max_tokens, made.llm.temperature = 4000, 48, 0
    return made


def texts(messages: list[dict[str, str]]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "assistant" and one["content"].strip()]


def conversation() -> None:
    chat = interpreter()
    assert texts(chat.chat("Answer in one short sentence: what is a river?", display=False))
    assert texts(chat.chat("And a lake?", display=False))


def stream() -> None:
    chunks = list(interpreter().chat("Say hello.", display=False, stream=True))
    assert sum(one.get("type") == "message" and "content" in one for one in chunks) > 1


def after_the_assistant() -> None:
    """The client sends the history as it stands, here with the assistant's message last."""
    chat = interpreter()
    chat.messages = [
        {"role": "user", "type": "message", "content": "Count to two."},
        {"role": "assistant", "type": "message", "content": "One."},
    ]
    answered = list(chat.llm.run([{"role": "system", "type": "message", "content": "Be brief."}, *chat.messages]))
    assert answered


main(conversation, stream, after_the_assistant)
