"""Runs cases with grpcurl, which learns the contract from the server's reflection.

    python -m tests.conformance.grpcurl_driver --program GRPCURL --addr HOST:PORT --cases FILE

It prints what the other drivers print. Metadata for the calls of reflection, where the server wants any, is
in the environment variable CONFORMANCE_REFLECTION, as "NAME: VALUE".
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from tests.conformance.calling import TIMEOUT_S

NAMES = {code.value[0]: code.name for code in grpc.StatusCode}
MAX_MESSAGE_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True)
    parser.add_argument("--addr", required=True)
    parser.add_argument("--cases", required=True, type=Path)
    arguments = parser.parse_args()
    for case in json.loads(arguments.cases.read_text()):
        print(
            json.dumps({"name": case["name"], **answer(arguments.program, arguments.addr, case)}), flush=True
        )


def answer(program: str, addr: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return the messages and the status of one call of grpcurl."""
    timeout_s = case.get("timeout_s", TIMEOUT_S)
    command = [program, "-plaintext", "-format-error", "-max-msg-sz", str(MAX_MESSAGE_BYTES)]
    command += ["-max-time", str(timeout_s), "-d", "@"]
    if reflection := os.environ.get("CONFORMANCE_REFLECTION"):
        command += ["-reflect-header", reflection]
    for name, value in case.get("metadata", {}).items():
        command += ["-rpc-header", f"{name}: {value}"]
    done = subprocess.run(
        [*command, addr, case["method"]],
        input="\n".join(map(json.dumps, case["requests"])),
        capture_output=True,
        text=True,
        timeout=timeout_s + 60,
        check=False,
    )
    messages = list(documents(done.stdout))
    if done.returncode == 0:
        return {"messages": messages, "status": {"code": "OK", "message": "", "details": []}}
    try:
        (status,) = documents(done.stderr)
    except ValueError as error:
        raise SystemExit(f"grpcurl failed at {case['name']}:\n{done.stderr}") from error
    return {
        "messages": messages,
        "status": {
            "code": NAMES[status.get("code", 0)],
            "message": status.get("message", ""),
            "details": [_camel(detail) for detail in status.get("details", [])],
        },
    }


def _camel(value: Any) -> Any:
    """Return the names of fields as JSON has them: in details grpcurl writes those of the .proto files."""
    if isinstance(value, list):
        return [_camel(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        re.sub("_([a-z])", lambda found: found[1].upper(), name): part if name == "metadata" else _camel(part)
        for name, part in value.items()
    }


def documents(text: str) -> Iterator[Any]:
    """Yield the JSON documents that stand one after the other."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        document, end = decoder.raw_decode(rest)
        yield document
        rest = rest[end:].lstrip()


if __name__ == "__main__":
    main()
