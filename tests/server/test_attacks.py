"""The attacks of benchmarks/attacks.py, which `make soak` and the benchmark repeat: each has one clear answer."""

import asyncio
from typing import Any

import pytest

from benchmarks.attacks import attacks, request, status
from tests.server.harness import Running, until

ATTACKS = attacks()


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_has_one_clear_answer(server: Running, name: str) -> None:
    one = ATTACKS[name]
    sent = request("localhost", one, "tiny", "none")
    assert asyncio.run(status("127.0.0.1", server.port, sent)) in one.statuses
    health: dict[str, Any] = server.health()
    assert (health["status"], health["restarts"]) == ("ready", 0)
    until(lambda: not server.llm.inflight)
