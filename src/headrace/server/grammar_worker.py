"""Looks at constraints from strangers, in a process of its own: may they be served, and does a finished text fit.

The kernel ends this process when one question takes more CPU time or memory than it may; nothing else ends with it.
Protocol: a line of JSON in ({"spec", "seconds"} and perhaps {"text"}), a line out ({"late"}, {"broken"} or {"error"}).
"""

import contextlib
import json
import signal
import sys
from typing import Any

from llguidance import LLMatcher

from headrace.decoding.constrained import limits
from headrace.decoding.grammar import grammar_of
from headrace.decoding.json_schema.validate import late_keywords, why_broken
from headrace.structured import ConstraintError, StructuredOutputs


def limit_process(memory: int) -> None:
    """Limit memory and files, where the system can; end at the timer."""
    if hasattr(signal, "SIGPROF"):
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
            resource.setrlimit(limit, (value, value))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, question["seconds"])
    try:
        spec = StructuredOutputs.of(question["spec"])
        if "text" in question:
            return {"broken": why_broken(spec, question["text"])}
        late = late_keywords(spec)
        if problem := LLMatcher.validate_grammar(grammar_of(spec), None, limits=limits()):
            return {"error": f"the constraint cannot be compiled: {' '.join(problem.split())[:300]}"}
        return {"late": late}
    except ConstraintError as error:
        return {"error": str(error)}
    except (RecursionError, MemoryError):
        return {"error": "the constraint is too large or nested too deeply; make it smaller"}
    except Exception as error:  # whatever a library makes of a stranger's input
        return {"error": f"the constraint cannot be understood ({type(error).__name__}); correct it"}
    finally:
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    limit_process(int(sys.argv[1]))
    for line in sys.stdin.buffer:
        sys.stdout.buffer.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
