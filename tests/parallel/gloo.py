"""Functions run by two or more processes that are one group of `torch.distributed` with gloo."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def in_group(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of `function(*args)` by rank, which is a function at the top of a module. Raises what a rank raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, world, port, answers, function, args)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        results = dict(answers.get(timeout=400) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    errors = [result for result in results.values() if isinstance(result, Failure)]
    if errors:
        raise AssertionError(errors[0].text)
    return [results[rank] for rank in range(world)]


class Failure:
    def __init__(self, text: str) -> None:
        self.text = text


def _rank(rank: int, world: int, port: int, answers: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world)
        answers.put((rank, function(*args)))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        traceback.print_exc(file=sys.stderr)
        answers.put((rank, Failure(traceback.format_exc())))
