"""What has been said in a chat: kept within the context, saved to a file, read back."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
FORMAT = "headrace chat"


class ConversationError(ValueError):
    """A conversation that cannot be saved, read or gone on with; the message says what to change."""


@dataclass(slots=True)
class Conversation:
    """Turns in order, each a message of the user and, once it is there, the answer; and the system prompt before them."""

    system: str | None = None
    turns: list[list[Message]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        self.turns[-1].append({"role": "assistant", "content": text})

    @property
    def messages(self) -> list[Message]:
        """All of it, as a chat template takes it."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self.turns for message in turn)]

    def fit(self, render: Callable[[Sequence[Message]], list[int]], most: int) -> tuple[list[int], list[list[Message]]]:
        """The prompt's token ids, `most` of them at the most, and the oldest turns that had to go for it.

        The last turn never goes: where it alone is too long, the prompt is. `render`: messages to token ids.
        """
        gone = []
        prompt = render(self.messages)
        while len(prompt) > most and len(self.turns) > 1:
            gone.append(self.turns.pop(0))
            prompt = render(self.messages)
        return prompt, gone

    def save(self, path: Path, model: str) -> None:
        """Write it whole or not at all. Raises ConversationError, also rather than replace a file of another kind."""
        if path.exists():
            load(path)
        data = {"format": FORMAT, "model": model, "system": self.system, "messages": [m for turn in self.turns for m in turn]}
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", "utf-8")
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConversationError(f"{path} cannot be written ({error.strerror or error}); name another file") from None


def load(path: Path) -> Conversation:
    """A saved conversation. Raises ConversationError for anything else."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConversationError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise ConversationError(f"{path} is no saved conversation; name another file") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("messages"), list):
        raise ConversationError(f"{path} is no saved conversation; name another file")
    found = Conversation()
    found.system = _text(path, data.get("system")) if data.get("system") is not None else None
    for message in data["messages"]:
        role = message.get("role") if isinstance(message, dict) else None
        expected = "user" if not found.turns or len(found.turns[-1]) == 2 else "assistant"
        if role != expected:
            raise ConversationError(f"{path}: its messages must be user and assistant in turn; repair it")
        text = _text(path, message.get("content"))
        found.ask(text) if role == "user" else found.answer(text)
    if found.turns and len(found.turns[-1]) == 1:
        raise ConversationError(f"{path}: its last message has no answer; repair it")
    return found


def _text(path: Path, value: object) -> str:
    if not isinstance(value, str):
        raise ConversationError(f"{path}: a message must be text, not {type(value).__name__}; repair it")
    return value
