"""Types of request fields with their limits: lengths, ranges, numbers of entries."""

from typing import Annotated, Any

from msgspec import Meta, Struct


class StrictStruct(Struct, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies. Types are strict (no "1" for 1), and unknown fields are errors.

    `__post_init__` of a subclass raises ValueError("field: requirement") for an invalid combination.
    """


Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Deadline = Annotated[float, Meta(gt=0, le=86_400)]  # seconds
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Word = Annotated[str, Meta(max_length=1024)]  # a name, a choice, a tag of the client
Name = Annotated[str, Meta(max_length=200)]  # of a stored object
Source = Annotated[str, Meta(max_length=256 << 10)]  # a regex or a grammar
StopText = Annotated[str, Meta(max_length=4096)]  # Limits.stop_chars is lower
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
# Seeds of the protocol are signed. SamplingParams checks the upper bound, which no msgspec type can express.
Seed = Annotated[int, Meta(ge=-(2**63), extra_json_schema={"maximum": 2**64 - 1})]

Words = Annotated[list[Word], Meta(max_length=64)]
Choices = Annotated[list[Source], Meta(max_length=4096)]
Tools = Annotated[list[Any], Meta(max_length=128)]
ToolItems = Annotated[list[dict[str, Any]], Meta(max_length=128)]
Items = Annotated[list[dict[str, Any]], Meta(max_length=10_000)]  # messages of a chat, items of a response
Settings = Annotated[dict[Word, Any], Meta(max_length=64)]  # small objects; their keys are checked elsewhere
Marks = Annotated[dict[Word, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]  # metadata

TEXTS, IDS = 4096, 262_144  # texts of one request; token ids of one prompt
Prompt = Annotated[list[TokenId], Meta(max_length=IDS)]
# Texts, token ids, or lists of these; `check_same_kind` checks what no type can express.
_ALIKE: dict[str, Any] = {
    "anyOf": [
        {"items": {"type": "integer"}},
        {"items": {"type": "string"}, "maxItems": TEXTS},
        {"items": {"type": "array"}, "maxItems": TEXTS},
    ]
}
Prompts = str | Annotated[list[TokenId | str | Prompt], Meta(max_length=IDS, extra_json_schema=_ALIKE)]


def check_same_kind(name: str, given: Any) -> None:
    """Raises ValueError if the entries of a list of prompts have different types, or if there are too many."""
    if not isinstance(given, list) or not given:
        return
    kind = type(given[0])
    if len(set(map(type, given))) > 1:
        other = next(at for at, entry in enumerate(given) if type(entry) is not kind)
        raise ValueError(f"{name}.{other}: must be of the same kind as the entries before it: text, token ids or lists of them")
    if kind is not int and len(given) > TEXTS:
        raise ValueError(f"{name}: must be a list of at most {TEXTS} entries")


class IgnoredFields(StrictStruct, kw_only=True):
    """Fields of other servers' protocols that are accepted and ignored."""

    user: Word | None = None
    metadata: Settings | None = None
    store: bool | None = None
    service_tier: Word | None = None
    safety_identifier: Word | None = None
    prompt_cache_key: Word | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: Settings | None = None
    verbosity: Word | None = None
    prediction: Settings | None = None
