"""The line on stderr that says what a command is at, from its first moment to its first answer."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from headrace.data.progress import Progress, Silent
from headrace.data.progress_bar import Moving, for_stream

STARTING = "starting"
# Commands that open a model, or wait long for something else.
LONG = {
    *("run", "chat", "ask", "generate", "embed", "classify", "serve", "perplexity", "arithmetic", "compare", "compress"),
    *("translate", "distil", "train-heads", "train-classifier", "bench"),
}
QUIET = {"-q", "--quiet", "-h", "--help", "--help-all"}
READ_ALOUD = 512  # tokens of a prompt below which its reading is not counted


@cache
def status() -> Progress:
    """The process's own."""
    return for_stream()


def begin(arguments: Sequence[str]) -> None:
    """Say at once that something happens, where a person waits: before anything is imported that takes a while."""
    status.cache_clear()
    if arguments and arguments[0] in LONG and not QUIET & set(arguments) and isinstance(status(), Moving):
        status().start(STARTING)


def moving(quiet: bool = False) -> Progress:
    """A line that moves where a person watches, and did not ask for silence; else nothing."""
    return status() if isinstance(status(), Moving) and not quiet else Silent()


def reading(llm: Any, made: Sequence[Any], progress: Progress, cancelled: Callable[[], bool]) -> Callable[[], bool]:
    """`cancelled`, for LLM.stream, which asks between steps; of a long prompt it is told on the way how much has been read."""
    seen = 0

    def ask() -> bool:
        nonlocal seen
        if made and seen >= 0:
            total, now = len(made[0].prompt_token_ids), llm.engine.tokens_read(made[0].request_id)
            if now >= total or total < READ_ALOUD:
                seen = -1
            elif now > seen:
                if seen == 0:
                    progress.start("reading the prompt", total, now, unit="tokens")
                else:
                    progress.advance(now - seen)
                seen = now
        return cancelled()

    return ask
