"""Peak resident memory of a model that runs at the limit of its plan, next to the bytes that `headrace fit` prints.

usage: python -m benchmarks.plan_memory FILE.gguf... [--context 2048] [--batch 1] [--chunk 512]

Each file is opened in a process of its own, which fills every sequence up to the context.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass

from headrace.startup.fit.headers import open_shape
from headrace.startup.fit.sizes import Load, bytes_of

TIMEOUT = 3600  # seconds
NEW_TOKENS = 4
# `process` says what the interpreter and the core take before the model is opened.
RUN = """
import json, os, sys
from headrace import LLM, SamplingParams
from headrace.host import peak_memory
file, context, batch, chunk = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(file, max_model_len=context, max_num_seqs=batch, max_num_batched_tokens=chunk, threads=2, speculate=None)
loaded = peak_memory(os.getpid())
prompts = [[(7 * i + j * (i + 3)) % 250 for j in range(context - {new})] for i in range(batch)]
llm.generate(prompts, SamplingParams(max_tokens={new}, temperature=0.0, ignore_eos=True))
print(json.dumps([loaded, peak_memory(os.getpid())]))
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one file: of the plan, after loading and at most. error: relative, of the plan."""

    planned: int
    loaded: int
    peak: int

    @property
    def error(self) -> float:
        return self.peak / self.planned - 1


def measure(file: str, load: Load) -> Memory:
    """Run the file at the limit of its plan. Raises ValueError with the error of the process."""
    planned = bytes_of(open_shape(file), load).total
    numbers = map(str, (load.context, load.batch, load.chunk))
    command = [sys.executable, "-c", RUN.replace("{new}", str(NEW_TOKENS)), file, *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    if done.returncode:
        raise ValueError(f"{file}: {(done.stderr.splitlines() or ['no message'])[-1]}")
    loaded, peak = json.loads(done.stdout.splitlines()[-1])
    return Memory(planned, loaded, peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+")
    for name, default in (("context", 2048), ("batch", 1), ("chunk", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    load = Load(given.context, given.batch, given.chunk)
    for file in given.files:
        found = measure(file, load)
        planned, loaded, peak = (each / 1e6 for each in (found.planned, found.loaded, found.peak))
        print(f"{file}: planned {planned:,.1f} MB, loaded {loaded:,.1f}, peak {peak:,.1f}, {found.error:+.1%}", flush=True)


if __name__ == "__main__":
    main()
