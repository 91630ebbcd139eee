"""langchain-tests: the standard suites of chat models and embeddings, one line for each test."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from checks import LARGE, URL


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # A copy elsewhere: next to this file pytest would load the conftest of Headrace's own tests.
        suite = Path(shutil.copy(Path(__file__).with_name("langchain_standard.py"), folder))
        suite.with_name("server.json").write_text(json.dumps([URL, LARGE]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, "-c", os.devnull]
        # The suite shares a client between its tests; the connections of that client belong to one event loop.
        options = ("asyncio_mode=auto", "asyncio_default_test_loop_scope=session", "asyncio_default_fixture_loop_scope=session")
        command += [word for option in options for word in ("-o", option)]
        command += [f"--junitxml={report}", str(suite)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        print(done.stdout[-6000:], file=sys.stderr)
        cases = list(ET.parse(report).iter("testcase"))
    failed = False
    for case in cases:
        name = case.attrib["name"]
        problem = next((one for kind in ("failure", "error") if (one := case.find(kind)) is not None), None)
        if case.find("skipped") is not None:
            continue
        error = "" if problem is None else " ".join(problem.attrib.get("message", "").split())[:300]
        failed = failed or bool(error)
        print(json.dumps({"check": name, "passed": not error, "error": error, "excuse": ""}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
