"""guidellm: `guidellm run` with prompts of a file; every request succeeds, with the requested number of tokens."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import SMALL, URL, main

REQUESTS, TOKENS = 6, 12


def measure(profile: str) -> dict[str, Any]:
    """The metrics of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [{"prompt": f"Name river {number}.", "output_tokens_count": TOKENS} for number in range(2 * REQUESTS)]
        (folder / "data.jsonl").write_text("\n".join(map(json.dumps, prompts)) + "\n")
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", "--profile", profile]
        command += ["--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model={SMALL}"]
        command += ["--data", f"kind=json_file,path={folder}/data.jsonl"]
        command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--output", f"kind=json,path={folder}/report.json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-300:] + done.stderr[-300:]
        (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
        metrics: dict[str, Any] = benchmark["metrics"]
        return metrics


def check_metrics(metrics: dict[str, Any]) -> None:
    totals = metrics["request_totals"]
    # With several streams guidellm itself may stop one request early.
    assert totals["errored"] == 0, totals
    assert 0 < totals["successful"] == totals["total"] <= REQUESTS, totals
    output = metrics["output_token_count"]["successful"]
    assert (output["min"], output["max"]) == (TOKENS, TOKENS), output
    assert metrics["time_to_first_token_ms"]["successful"]["min"] > 0


def synchronous() -> None:
    check_metrics(measure("kind=synchronous"))


def concurrent() -> None:
    check_metrics(measure("kind=concurrent,streams=3"))


def constant_rate() -> None:
    check_metrics(measure("kind=constant,rate=2"))


main(synchronous, concurrent, constant_rate)
