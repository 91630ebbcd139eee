"""How much of everything a request may hold. The first mistake in a list ends the look at it, so a million cost no more."""

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


@dataclass(frozen=True, slots=True)
class AtMost:
    """Of a list or a mapping: so many entries, and of its mistakes the first alone is told."""

    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        schema["max_length"] = self.most
        if schema["type"] == "list":
            schema["fail_fast"] = True
            return schema
        return core_schema.no_info_before_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        """A mapping is counted before anything in it is looked at."""
        if isinstance(value, dict) and len(value) > self.most:
            said = {"field_type": "Dictionary", "max_length": self.most, "actual_length": len(value)}
            raise PydanticKnownError("too_long", said)
        return value


class Strict(BaseModel):
    """Types are meant (no "1" for 1), and an unknown field is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_all_but_one_unknown(cls, data: Any) -> Any:
        """Of many unknown fields the first is told."""
        if not isinstance(data, dict) or len(data) <= len(cls.model_fields):
            return data
        known = {name: value for name, value in data.items() if name in cls.model_fields}
        first = next(name for name in data if name not in known)
        return {**known, first: data[first]}


Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Deadline = Annotated[float, Field(gt=0, le=86_400)]  # seconds
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Word = Annotated[str, Field(max_length=1024)]  # a name, a choice among few, a mark of the client's
Source = Annotated[str, Field(max_length=256 << 10)]  # a regex or a grammar
StopText = Annotated[str, Field(max_length=4096)]  # the server's own limit is lower
Salt = Annotated[str, Field(min_length=1, max_length=256)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]  # the protocol's are signed

Words = Annotated[list[Word], AtMost(64)]
Choices = Annotated[list[Source], AtMost(4096)]
Tools = Annotated[list[Any], AtMost(128)]
ToolItems = Annotated[list[dict[str, Any]], AtMost(128)]
Items = Annotated[list[dict[str, Any]], AtMost(10_000)]  # messages of a chat, items of a response
Settings = Annotated[dict[Word, Any], AtMost(64)]  # small objects whose keys are looked at elsewhere
Marks = Annotated[dict[Word, Annotated[str, Field(max_length=512)]], AtMost(16)]  # metadata
Texts = Annotated[list[str], AtMost(4096)]
Prompt = Annotated[list[TokenId], AtMost(262_144)]
Prompts = Annotated[list[Prompt], AtMost(4096)]
