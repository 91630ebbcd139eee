"""Lines of a JSONL file, one request each. Batches of the server and `headrace generate` read them with these functions."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.server.http.api_error import ApiError
from headrace.server.http.body_limits import json_problem, read_json

BOM = b"\xef\xbb\xbf"
LINE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
MAX_ID = 512  # characters of a custom_id


class LineError(ValueError):
    """A line that is no valid request. The message names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of OpenAI's batch API. Its body is not checked.

    Source: https://platform.openai.com/docs/api-reference/batch/request-input
    """

    custom_id: str
    url: str
    body: dict[str, Any]


def strip_line(line: bytes, number: int) -> bytes:
    """A line without surrounding white space; line 1 also without the byte order mark that some editors write."""
    return (line.removeprefix(BOM) if number == 1 else line).strip()


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line: standard JSON, and no name twice in an object. Raises LineError."""
    try:
        value = read_json(line)
        json.loads(line, object_pairs_hook=_unique_fields)
    except ApiError as error:
        raise LineError(error.message.replace("the body", "it", 1)) from None
    except msgspec.ValidationError:
        raise LineError("a number is out of range; it must be nearer to zero") from None
    except (msgspec.DecodeError, RecursionError):
        raise LineError(json_problem(line, "the line")) from None
    if not isinstance(value, dict):
        raise LineError(f"a line must be a JSON object, not {type(value).__name__}")
    return value


def read_batch_line(fields: dict[str, Any], urls: tuple[str, ...]) -> BatchLine:
    """The batch line with these fields; null means absent. urls: the endpoints it may name. Raises LineError."""
    given = {name: value for name, value in fields.items() if value is not None}
    if unknown := sorted(given.keys() - LINE_FIELDS):
        raise LineError(f"unknown field {unknown[0][:60]!r}; a batch line has custom_id, method, url and body")
    if (method := given.get("method", "POST")) != "POST":
        raise LineError(f"method must be POST, not {method!r:.40}")
    if (url := given.get("url")) not in urls:
        raise LineError(f"url must be {' or '.join(urls)}, not {url!r:.80}")
    if not isinstance(body := given.get("body"), dict):
        raise LineError("body must be a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        raise LineError(f"custom_id must be text of 1 to {MAX_ID} characters")
    return BatchLine(custom_id, url, body)


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LineError(f"field {twice[:60]!r} occurs twice; remove one")
    return fields
