"""Runs cases with the Python client's connection.

    python -m tests.conformance.python_driver --addr HOST:PORT --cases FILE

It prints one line of JSON for each case: its name, the messages that came, and the status.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from penstock.client import Client
from tests.conformance.calling import TIMEOUT_S, call, outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--addr", required=True)
    parser.add_argument("--cases", required=True, type=Path)
    arguments = parser.parse_args()
    with Client(arguments.addr) as client:
        for case in json.loads(arguments.cases.read_text()):
            replies = call(
                client.channel,
                case["method"],
                case["requests"],
                case.get("metadata"),
                case.get("timeout_s", TIMEOUT_S),
            )
            print(json.dumps({"name": case["name"], **outcome(replies)}), flush=True)


if __name__ == "__main__":
    main()
