"""Offline batches on a Ray cluster: actors with one engine each answer the lines of a file; this process writes the records.

Ray gets the path of a class and plain arguments. It starts an actor again that is lost, and repeats its lines.
"""

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.data.params import SamplingParams
from headrace.data.settings import ModelSettings
from headrace.llm import LLM
from headrace.workflows.batch import answer, error_record
from headrace.workflows.batch_output import BatchOutput, RequestId
from headrace.workflows.batch_requests import BatchRequest, parse_object, parse_request, read_requests

# Makes the parameters of a request from an opened model and plain data.
Params = Callable[[LLM, Mapping[str, Any]], Callable[..., SamplingParams]]
BATCH = 4  # lines of a task, for each sequence that can run


class Records:
    """Receives the records of one task, in place of a BatchOutput."""

    def __init__(self) -> None:
        self.done: set[RequestId] = set()
        self.records: list[dict[str, Any]] = []

    def append(self, record: dict[str, Any]) -> None:
        self.records.append(record)


class Answerer:
    """An actor: one engine that answers lines. model: path on every host. settings: of ModelSettings, plain data. params: makes
    the parameters from `given`, plain data."""

    def __init__(self, model: str, settings: dict[str, Any], params: Params, given: dict[str, Any]) -> None:
        self._llm = LLM.from_settings(model, ModelSettings(**settings))
        self._params = params(self._llm, given)

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        """Answer rows with columns number, id (JSON) and line; returns the column record (JSON)."""
        columns = (rows[name].tolist() for name in ("number", "id", "line"))
        requests = [row_request(*row) for row in zip(*columns, strict=True)]
        records = Records()
        answer(self._llm, requests, records, self._params)  # type: ignore[arg-type]
        return {"record": [json.dumps(record) for record in records.records]}


def row_request(number: int, request_id: str, line: bytes) -> BatchRequest:
    """The request of one row."""
    return replace(parse_request(parse_object(line, number), number, {}), id=json.loads(request_id))


def rows_of(source: Path, output: BatchOutput) -> Iterator[dict[str, Any]]:
    """The lines without a record, as rows. Invalid lines get their record at once."""
    requests = {request.line: request for request in _pending(source, output)}
    with source.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number in requests:
                yield {"number": number, "id": json.dumps(requests[number].id), "line": line}


def _pending(source: Path, output: BatchOutput) -> Iterable[BatchRequest]:
    for request in read_requests(source):
        if request.id in output.done:
            continue
        if isinstance(request, BatchRequest):
            yield request
        else:
            output.append(error_record(request, request.error))


def run(
    source: Path,
    output: BatchOutput,
    model: str,
    settings: dict[str, Any],
    params: Params,
    given: dict[str, Any],
    *,
    actors: tuple[int, int],
    stepped: Callable[[int], None] = lambda done: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Answer the lines of `source` that have no record in `output`, which is locked, by `actors` (least, most) actors.

    Raises ValueError if Ray is not installed.
    """
    rows = list(rows_of(source, output))
    if not rows:
        return
    ray = connect()
    try:
        size = BATCH * settings["max_num_seqs"]
        data = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // size))
        answered = data.map_batches(
            Answerer,
            fn_constructor_args=(model, settings, params, given),
            batch_size=size,
            compute=ray.data.ActorPoolStrategy(min_size=actors[0], max_size=actors[1]),
            num_cpus=settings["threads"] or 1,
        )
        for row in answered.iter_rows():
            record = json.loads(row["record"])
            if record["id"] not in output.done:  # of a task that was repeated
                output.append(record)
            stepped(len(output.done))
            if stop():
                return
    finally:
        ray.shutdown()


def check_address(opened: bool) -> None:
    """Raise ValueError unless there is a cluster (RAY_ADDRESS), or one of this process may be started (`opened`)."""
    if not opened and not os.environ.get("RAY_ADDRESS"):
        raise ValueError(
            "RAY_ADDRESS is not set, and a Ray of this process listens on every network of this machine; set RAY_ADDRESS to a "
            "running cluster, or add --ray-open in a private network"
        )


def connect(what: str = "--ray") -> Any:
    """Connect to the cluster of RAY_ADDRESS, with tokens; or start one of this process. what: needs Ray. Raises ValueError."""
    # Ray runs code for every process that reaches it.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not os.environ.get("RAY_ADDRESS"):
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        import ray
        from ray import data as ray_data
    except ImportError:
        raise ValueError(f"{what} needs Ray; install it with: pip install '.[ray]' in Headrace's folder") from None
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="warning")
    ray_data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray
