"""Runs the transcriptions of several files side by side on one engine."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headrace.audio.channels import SoundFile
from headrace.audio.transcript import Segment, Transcript
from headrace.audio.transcription import Window
from headrace.data.outputs import RequestOutput
from headrace.data.windows import WindowOutput

Running = Generator[Window | Segment, WindowOutput, Any]
Event = Segment | Transcript | Exception  # the last event of a file is its transcript, or the error that ended it


@dataclass
class Task:
    """A generator of windows. output: of its window in the engine. segments: not delivered yet."""

    windows: Running
    output: RequestOutput | None = None
    segments: list[Segment] = field(default_factory=list)
    ended: bool = False


@dataclass
class File:
    """A file that is being transcribed. tasks: first its start, then its sections, in order. following: sections to begin."""

    number: int
    sound: SoundFile
    tasks: deque[Task] = field(default_factory=deque)
    following: deque[Task] = field(default_factory=deque)
    inbox: deque[Any] = field(default_factory=deque)

    @property
    def open(self) -> list[Task]:
        """Tasks with a window in the engine, or to be continued."""
        return [task for task in self.tasks if not task.ended]


def run_together(callers: Any, files: Iterable[SoundFile], most: int) -> Iterator[tuple[int, Event]]:
    """Transcribe files, with at most `most` windows at a time. Yields events with the number of their file.

    callers: the engine's Lockstep. Closing the iterator aborts the open windows.
    """
    waiting, running = enumerate(files), list[File]()
    try:
        while True:
            _begin(running, waiting, most)
            if not running:
                return
            stepped = False
            for file in list(running):
                for task in file.open:
                    if task.output is not None and not task.output.finished:
                        continue
                    stepped = True
                    if (error := _advance(callers, file, task)) is not None:
                        running.remove(file)
                        callers.abort(file.inbox)
                        yield file.number, error
                        break
                if file in running:
                    yield from ((file.number, segment) for segment in _delivered(file))
                    if not file.tasks and not file.following:
                        running.remove(file)
                        transcript = file.sound.transcript()
                        if file.sound.split:
                            yield from ((file.number, segment) for segment in transcript.segments)
                        yield file.number, transcript
                file.inbox.clear()
            if not stepped:
                callers.step()
    finally:
        for file in running:
            callers.abort(file.inbox)


def _begin(running: list[File], waiting: Iterator[tuple[int, SoundFile]], most: int) -> None:
    """Begin sections of running files, and further files, up to `most` tasks."""
    room = most - sum(len(file.open) for file in running)
    for file in running:
        while room > 0 and file.following:
            file.tasks.append(file.following.popleft())
            room -= 1
    while room > 0 and (following := next(waiting, None)) is not None:
        number, sound = following
        running.append(File(number, sound, deque([Task(sound.start())])))
        room -= 1


def _advance(callers: Any, file: File, task: Task) -> Exception | None:
    """Run a task up to its next window, which is queued, or its end. Returns the error that ended it."""
    for event in next_events(task.windows, None if task.output is None else _result(task.output)):
        if isinstance(event, Exception):
            return event
        if isinstance(event, Window):
            more = {"inbox": file.inbox, "source": event.source, "align": event.align}
            (task.output,) = callers.add_all([event.prompt], [event.params], (), None, **more)
            return None
        if isinstance(event, Segment):
            task.segments.append(event)
        else:
            task.ended = True
            file.following.extend(map(Task, event or ()))
    return None


def _delivered(file: File) -> Iterator[Segment]:
    """Remove and yield the segments of the first open task, and of the ended ones before it."""
    while file.tasks:
        task = file.tasks[0]
        yield from task.segments
        task.segments.clear()
        if not task.ended:
            return
        file.tasks.popleft()


def _result(output: RequestOutput) -> WindowOutput | Exception:
    """The output of a finished window, or the error that ended it."""
    if output.error is not None:
        return ValueError(f"a window could not be decoded: {output.error}")
    choices = [(one.token_ids, one.cumulative_logprob or 0.0) for one in output.outputs]
    logprobs = [[entry.logprob for entry in one.logprobs or ()] for one in output.outputs]
    return WindowOutput(choices, logprobs, output.pooled)


def next_events(windows: Running, output: WindowOutput | Exception | None) -> Iterator[Any]:
    """What a generator yields after a window's output (None at its start), up to its next window or its end. The last event is
    this window, the generator's result, or the error that ended it."""
    try:
        if isinstance(output, Exception):
            raise output
        event = next(windows) if output is None else windows.send(output)
        while not isinstance(event, Window):
            yield event
            event = next(windows)
        yield event
    except StopIteration as end:
        yield end.value
    except Exception as error:
        # The other files go on.
        yield error
