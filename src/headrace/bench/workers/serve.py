"""Process of a measured engine: loads one worker file, then runs one measurement for every line on stdin.

    python -P serve.py llamacpp.py            with the Python of that engine's own virtual environment

The first line has the arguments of the worker's class `Worker`; its answer comes when the model is loaded. Each further line is
one measurement:

    {"model": "…", "threads": 2, "setting": {}, "kv_bytes": 1e8}       {"about": "…", "load_s": 0.3}
    {"cell": "b4", "prompts": [[…], …], "new_tokens": 32}              {"tokens_per_s": 512.3, "seconds": …, "first": […], …}

`new_tokens` 0 measures prefill, up to the first token; otherwise decoding of `new_tokens` tokens after the first, for every
prompt. With "fed", which only Headrace supports, it measures `new_tokens` steps of that many tokens of every prompt. "options"
are further arguments of `worker.run`. A fourth return value of `run` is the number of tokens, if it differs. "build" in the
first answer identifies the build of a worker that has several.
Errors are {"error": "…"}. The end of stdin ends the process. Uses the standard library alone, nothing of Headrace.
"""

import json
import os
import resource
import runpy
import sys
import time
from typing import Any


def main(path: str) -> None:
    replies = os.fdopen(os.dup(1), "w")
    # Output of the engine to stdout must not mix with the answers.
    os.dup2(2, 1)
    worker: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if worker is None:
                # Imports of the engine do not count as loading time.
                worker_class = runpy.run_path(path)["Worker"]
                start = time.perf_counter()
                worker = worker_class(**command)
                reply = {"about": worker.about, "load_s": time.perf_counter() - start}
                reply |= {"build": worker.build} if hasattr(worker, "build") else {}
            else:
                reply = measure(worker, **{name: value for name, value in command.items() if name != "cell"})
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps({**reply, "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}) + "\n")
        replies.flush()
        if worker is None:
            return


def measure(
    worker: Any, prompts: list[list[int]], new_tokens: int, fed: int = 1, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Run one cell. `worker.run` returns seconds until all prompts have their first token, seconds after that, these tokens."""
    arguments = [fed] if fed > 1 else []
    prefill_s, decode_s, first, *count = worker.run(prompts, new_tokens, *arguments, **(options or {}))
    tokens = count[0] if count else len(prompts) * new_tokens * fed or sum(map(len, prompts))
    seconds = decode_s if new_tokens else prefill_s
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens, "prefill_s": prefill_s, "first": first}


if __name__ == "__main__":
    main(sys.argv[1])
