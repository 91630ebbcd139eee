"""Prompts out of a file: JSON lines with "prompt", "messages" or "turns" (the first is taken), or plain lines."""

import json
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, Any]]


def read_prompts(path: Path, most: int | None = None) -> list[Prompt]:
    """Texts and conversations in the order of the file, `most` at most. Raises ValueError, naming the line."""
    found: list[Prompt] = []
    for number, line in enumerate(lines_of(path), 1):
        if line.strip() and (most is None or len(found) < most):
            found.append(_prompt(line, number, path.suffix == ".jsonl"))
    if not found:
        raise ValueError(f"{path} has no prompt; write one a line")
    return found


def lines_of(path: Path) -> list[str]:
    """The lines of a file: they end at line feeds alone, as JSON may hold what else ends a line (U+2028). Raises ValueError
    where it is no text."""
    try:
        return path.read_text("utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text; give prompts, one a line") from None


def _prompt(line: str, number: int, is_json: bool) -> Prompt:
    if not is_json:
        return line
    try:
        fields = json.loads(line)
    except ValueError:
        raise ValueError(f"line {number} is not JSON") from None
    fields = fields if isinstance(fields, dict) else {}
    if isinstance(fields.get("messages"), list):
        return fields["messages"]
    prompt = fields.get("prompt") or next(iter(fields.get("turns") or ()), None)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'line {number} has no text in "prompt", "turns" or "messages"')
    return prompt


def tokens_of(llm: Any, prompt: Prompt, chat: bool) -> list[int]:
    """Token ids of a prompt: through the chat template where it is a conversation, or `chat` is asked for."""
    if isinstance(prompt, str) and not chat:
        ids: list[int] = llm.tokenizer.encode(prompt)
        return ids
    messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    rendered: list[int] = llm.render(messages)
    return rendered
