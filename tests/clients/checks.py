"""Runs the checks of one client and prints one JSON line for each. Standard library only: it runs in the client's Python.

URL and KEY are those of the server. SMALL serves checks of the protocol, LARGE those that need a model with some skill.
"""

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

URL, SMALL, LARGE = sys.argv[1:]
KEY = "none"
Check = Callable[[], Any]
MODELS_FAULT: dict[str, str] = {}  # checks that a weak model may fail -> how


def of_model(how: str) -> Callable[[Check], Check]:
    """A check whose failure may be the model's: `how` says what a weak model does."""

    def mark(check: Check) -> Check:
        MODELS_FAULT[check.__name__] = how
        return check

    return mark


def main(*checks: Check) -> None:
    """Run all checks; the exit code is 1 if one failed that no model can be blamed for."""
    failed = False
    for check in checks:
        name, error = check.__name__, ""
        try:
            asyncio.run(check()) if inspect.iscoroutinefunction(check) else check()
        except Exception as raised:
            traceback.print_exc()
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
        excuse = MODELS_FAULT.get(name, "") if error else ""
        failed = failed or bool(error and not excuse)
        print(json.dumps({"check": name, "passed": not error, "error": error, "excuse": excuse}), flush=True)
    sys.exit(failed)
