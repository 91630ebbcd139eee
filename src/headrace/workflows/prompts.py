"""Prompts of a file: plain lines, or JSON lines with "prompt", "messages" or "turns" (uses the first turn)."""

import json
from pathlib import Path
from typing import Any

Prompt = str | list[dict[str, Any]]


def read_prompts(path: Path, most: int | None = None) -> list[Prompt]:
    """Return the texts and conversations of a file, `most` at most. Raises ValueError, naming the line."""
    prompts: list[Prompt] = []
    for number, line in enumerate(lines_of(path), 1):
        if line.strip() and (most is None or len(prompts) < most):
            prompts.append(_prompt(line, number, path.suffix == ".jsonl"))
    if not prompts:
        raise ValueError(f"{path} has no prompt; write one a line")
    return prompts


def read_references(path: Path) -> list[str]:
    """Return the text in "reference" of each prompt of a .jsonl file. Raises ValueError, naming the line."""
    references = []
    for number, line in enumerate(lines_of(path), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line) if path.suffix == ".jsonl" else {}
        except ValueError:
            raise ValueError(f"line {number} is not JSON") from None
        reference = fields.get("reference") if isinstance(fields, dict) else None
        if not isinstance(reference, str) or not reference:
            raise ValueError(f'{path}, line {number}: has no text in "reference", which the loss risk compares with')
        references.append(reference)
    return references


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file without a byte order mark. Splits at line feeds alone: JSON strings may contain U+2028.

    Raises ValueError if the file is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; give prompts, one per line") from None


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
    """Return the token ids of a prompt; a conversation, or any prompt with `chat`, goes through the chat template."""
    if isinstance(prompt, str) and not chat:
        ids: list[int] = llm.tokenizer.encode(prompt)
        return ids
    messages = prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    rendered: list[int] = llm.render(messages)
    return rendered
