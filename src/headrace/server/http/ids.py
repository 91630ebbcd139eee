"""Identifiers and timestamps of answers, in the form of the OpenAI protocol."""

import secrets
import time

# Kinds of objects whose identifier has a dash after the kind.
DASHED = frozenset({"cmpl", "chatcmpl", "file"})


def new_id(kind: str) -> str:
    """A new random identifier: cmpl-…, chatcmpl-…, file-…; with an underscore for other kinds (msg_…, fc_…)."""
    return f"{kind}{'-' if kind in DASHED else '_'}{secrets.token_hex(12)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
