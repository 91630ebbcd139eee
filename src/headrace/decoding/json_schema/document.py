"""One JSON schema as a document: its draft, its references, and a bound on the work it may cause."""

from typing import Any
from urllib.parse import unquote

from headrace.data.structured import ConstraintError

MAX_WORK = 20_000  # subschemas visited


class InexpressibleError(Exception):
    """No schema without the keyword expresses this exactly."""


class Document:
    """A schema and its local references. Raises ConstraintError if it is too large, or if a reference leads nowhere."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        draft = str(root.get("$schema", ""))
        self.old_refs = any(f"draft-0{n}" in draft for n in (3, 4, 6, 7))  # keywords next to a $ref are ignored
        old_places = self.old_refs or "2019-09" in draft
        self.places = "items" if old_places else "prefixItems"  # keyword of the schemas by position
        self._work = 0

    def count(self) -> None:
        """Count one visited subschema."""
        self._work += 1
        if self._work > MAX_WORK:
            raise ConstraintError("the JSON schema is too complex; simplify it")

    def resolve(self, ref: Any) -> Any:
        """The target of a local reference (`#`, `#/a/b`). Raises ConstraintError."""
        if not is_local(ref):
            raise ConstraintError(f"the JSON schema refers to {str(ref)[:80]!r}; only references within it (#/…) are followed")
        target: Any = self.root
        for part in ref.split("/")[1:]:
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdigit() and len(name) < 9 and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            else:
                raise ConstraintError(f"the JSON schema refers to {ref[:80]!r}, which is not there; correct it")
        if not isinstance(target, (dict, bool)):
            raise ConstraintError(f"the JSON schema refers to {ref[:80]!r}, which is not a schema; correct it")
        return target

    def own(self, schema: dict[str, Any]) -> dict[str, Any]:
        """The keywords that count: in old drafts a reference alone."""
        return {"$ref": schema["$ref"]} if self.old_refs and "$ref" in schema else schema


def is_local(ref: Any) -> bool:
    return isinstance(ref, str) and (ref == "#" or ref.startswith("#/"))
