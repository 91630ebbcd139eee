"""What a measured engine runs in: one file of this folder, loaded once, then one measurement for every line on stdin.

    python -P serve.py llamacpp.py            with the Python of that engine's own virtual environment

The first line says what to load, and is answered when it is loaded; the others name a cell each:

    {"model": "…", "threads": 2, "setting": {}, "kv_bytes": 1e8}       {"about": "…", "load_s": 0.3}
    {"cell": "b4", "prompts": [[…], …], "new_tokens": 32}              {"tokens_per_s": 512.3, "seconds": …, "first": […], …}

`new_tokens` 0 measures prefill, up to the first token; otherwise decode, `new_tokens` after the first for every prompt. With
"fed", which Headrace alone knows, it is `new_tokens` steps, each of so many tokens of every prompt. "options" are more
arguments of `worker.run`, which may say how many tokens it has made, where that is another number. A worker that is one of
several builds says which: "build".
An error is {"error": "…"}. The end of stdin ends the process. Needs the standard library alone, nothing of Headrace.
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
    os.dup2(2, 1)  # engines print to stdout what they please
    worker: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if worker is None:
                make = runpy.run_path(path)["Worker"]  # the engine's imports: no part of loading a model
                start = time.perf_counter()
                worker = make(**command)
                reply = {"about": worker.about, "load_s": time.perf_counter() - start}
                reply |= {"build": worker.build} if hasattr(worker, "build") else {}
            else:
                reply = measure(worker, **{name: value for name, value in command.items() if name != "cell"})
        except Exception as error:  # whatever an engine raises is the answer
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps({**reply, "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}) + "\n")
        replies.flush()
        if worker is None:
            return


def measure(
    worker: Any, prompts: list[list[int]], new_tokens: int, fed: int = 1, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One cell: `worker.run` gives seconds until every prompt had its first token, seconds after that, and those tokens."""
    arguments = [fed] if fed > 1 else []
    prefill_s, decode_s, first, *made = worker.run(prompts, new_tokens, *arguments, **(options or {}))
    tokens = made[0] if made else len(prompts) * new_tokens * fed or sum(map(len, prompts))
    seconds = decode_s if new_tokens else prefill_s
    return {"tokens_per_s": tokens / seconds, "seconds": seconds, "tokens": tokens, "prefill_s": prefill_s, "first": first}


if __name__ == "__main__":
    main(sys.argv[1])
