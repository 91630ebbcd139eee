"""The progress line of a command on stderr, from its start to its first output."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from headrace.data.progress import Progress, Silent
from headrace.data.progress_bar import Moving, for_stream

STARTING = "starting"
# Commands that take long to start.
LONG = {
    *("run", "chat", "ask", "generate", "embed", "classify", "serve", "perplexity", "arithmetic", "compare", "compress"),
    *("translate", "distil", "train-heads", "train-classifier", "bench"),
}
QUIET = {"-q", "--quiet", "-h", "--help", "--help-all"}
# Shortest prompt, in tokens, whose prefill shows its progress.
SHOWN_PROMPT = 512


@cache
def status() -> Progress:
    """Return the progress display of the process."""
    return for_stream()


def begin(arguments: Sequence[str]) -> None:
    """Show "starting" on a terminal at once, before the slow imports."""
    status.cache_clear()
    if arguments and arguments[0] in LONG and not QUIET & set(arguments) and isinstance(status(), Moving):
        status().start(STARTING)


def moving(quiet: bool = False) -> Progress:
    """Return the progress bar on a terminal, otherwise, or with `quiet`, a silent one."""
    return status() if isinstance(status(), Moving) and not quiet else Silent()


def watch_prompt(llm: Any, outputs: Sequence[Any], progress: Progress, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap `cancelled` for LLM.stream, which calls it between steps, to show the prefill of a long prompt."""
    seen = 0

    def check() -> bool:
        nonlocal seen
        if outputs and seen >= 0:
            total, now = len(outputs[0].prompt_token_ids), llm.engine.tokens_read(outputs[0].request_id)
            if now >= total or total < SHOWN_PROMPT:
                seen = -1
            elif now > seen:
                if seen == 0:
                    progress.start("reading the prompt", total, now, unit="tokens")
                else:
                    progress.advance(now - seen)
                seen = now
        return cancelled()

    return check
