"""Conversation history: fitted to the context, saved to a file, loaded."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Message = dict[str, Any]
FORMAT = "headrace chat"


@dataclass(slots=True)
class Conversation:
    """A system prompt and turns; each turn is a message of the user, followed by the answer once there is one."""

    system: str | None = None
    turns: list[list[Message]] = field(default_factory=list)

    def ask(self, text: str) -> None:
        self.turns.append([{"role": "user", "content": text}])

    def answer(self, text: str) -> None:
        self.turns[-1].append({"role": "assistant", "content": text})

    @property
    def messages(self) -> list[Message]:
        """All messages, for a chat template."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *(message for turn in self.turns for message in turn)]

    def fit(self, render: Callable[[Sequence[Message]], list[int]], longest: int) -> tuple[list[int], list[list[Message]]]:
        """Drop the oldest turns until the prompt has at most `longest` tokens. Returns its token ids and the dropped turns.

        The last turn stays, even if it alone is too long. render: returns the token ids of messages.
        """
        dropped = []
        prompt = render(self.messages)
        while len(prompt) > longest and len(self.turns) > 1:
            dropped.append(self.turns.pop(0))
            prompt = render(self.messages)
        return prompt, dropped

    def save(self, path: Path, model: str) -> None:
        """Write the conversation atomically. Raises ValueError, also for an existing file of another kind."""
        if path.exists():
            load(path)
        data = {"format": FORMAT, "model": model, "system": self.system, "messages": [m for turn in self.turns for m in turn]}
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_text(json.dumps(data, ensure_ascii=False, indent=2) + "\n", "utf-8")
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ValueError(f"{path} cannot be written ({error.strerror or error}); name another file") from None


def load(path: Path) -> Conversation:
    """Load a saved conversation. Raises ValueError for any other file."""
    try:
        data = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not a saved conversation; name another file") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("messages"), list):
        raise ValueError(f"{path} is not a saved conversation; name another file")
    conversation = Conversation()
    conversation.system = _text(path, data.get("system")) if data.get("system") is not None else None
    for message in data["messages"]:
        role = message.get("role") if isinstance(message, dict) else None
        expected = "user" if not conversation.turns or len(conversation.turns[-1]) == 2 else "assistant"
        if role != expected:
            raise ValueError(f"{path}: its messages must be user and assistant in turn; repair it")
        text = _text(path, message.get("content"))
        conversation.ask(text) if role == "user" else conversation.answer(text)
    if conversation.turns and len(conversation.turns[-1]) == 1:
        raise ValueError(f"{path}: its last message has no answer; repair it")
    return conversation


def _text(path: Path, value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{path}: a message must be text, not {type(value).__name__}; repair it")
    return value
