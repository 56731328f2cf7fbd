"""Plain protoc makes code of the contract that is named as the pages say, without any options for names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

from penstock.v1 import adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2
from tests.support.toolchains import ROOT, require

FILES: list[FileDescriptor] = [
    module.DESCRIPTOR
    for module in (adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2)
]
PROTOC = Path(sys.executable).with_name("protoc")
GO = ROOT / "clients" / "go"
GO_STUBS = GO / "penstockv1"
PLUGINS = {
    "protoc-gen-go": "google.golang.org/protobuf/cmd/protoc-gen-go",
    "protoc-gen-go-grpc": "google.golang.org/grpc/cmd/protoc-gen-go-grpc",
}
LIMIT_S = 900


def run(*command: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr


def generate(*flags: str) -> None:
    """Run protoc on all files of the contract."""
    names = [file.name for file in FILES]
    assert sorted(names) == sorted(
        str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")
    )
    run(str(PROTOC), "-I", str(ROOT / "protos"), *flags, *names)


def test_java_has_one_class_for_each_message_in_the_package_of_the_contract(tmp_path: Path) -> None:
    generate(f"--java_out={tmp_path}")
    assert {path.parent for path in tmp_path.rglob("*.java")} == {tmp_path / "penstock" / "v1"}
    classes = {path.stem for path in tmp_path.rglob("*.java")}
    for file in FILES:
        expected = {*file.message_types_by_name, *file.enum_types_by_name}
        assert expected <= classes, file.name
    source = (tmp_path / "penstock" / "v1" / "GenerateRequest.java").read_text()
    assert "package penstock.v1;" in source.splitlines()


@pytest.mark.sweep("Go")
def test_go_has_the_code_that_the_client_has(tmp_path: Path) -> None:
    """Also for somebody who has no buf: only the line that names protoc's version differs."""
    require("go")
    plugins = []
    for name, package in PLUGINS.items():
        run("go", "build", "-o", str(tmp_path / name), package, cwd=GO)
        plugins.append(f"--plugin={name}={tmp_path / name}")
    generate(*plugins, f"--go_out={tmp_path}", f"--go-grpc_out={tmp_path}")
    made = tmp_path / "penstock" / "clients" / "go" / "penstockv1"  # as go_package says
    checked_in = {path.name: without_version(path) for path in GO_STUBS.iterdir()}
    assert {path.name: without_version(path) for path in made.iterdir()} == checked_in


def without_version(path: Path) -> str:
    """Return what a generated file says, but for the version of protoc."""
    return re.sub(r"(?m)^// ?[-\t ]*protoc .*\n", "", path.read_text())
