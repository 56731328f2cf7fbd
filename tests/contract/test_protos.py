"""The contract: twin messages stay twins, enums start with unspecified, and the checked-in code is up to
date.
"""

import filecmp
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import google.protobuf
import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from packaging.requirements import Requirement
from packaging.version import Version

from penstock.v1 import (
    adapters_pb2,
    control_pb2,
    inference_pb2,
    inference_pb2_grpc,
    telemetry_pb2,
    types_pb2,
    weights_pb2,
)

REPOSITORY = Path(__file__).parents[2]
GENERATED = REPOSITORY / "protos" / "penstock" / "v1"
GATEWAYS = REPOSITORY / "service" / "penstock" / "service" / "gateways"
FILES = [
    module.DESCRIPTOR
    for module in (adapters_pb2, control_pb2, inference_pb2, telemetry_pb2, types_pb2, weights_pb2)
]
TOOLS = Path(sys.executable).parent
FIRST = Path(__file__).with_name("first_contract.binpb")


def buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run buf as `make` does, with the programs of this environment first on PATH."""
    environment = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        [TOOLS / "buf", *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def shape(field: FieldDescriptor) -> tuple[object, ...]:
    """Everything that a caller sees of a field except its comment."""
    named = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else None
    return field.name, field.type, named and named.full_name, field.is_repeated, field.has_presence, oneof


def shared_part(message: Descriptor) -> dict[int, tuple[object, ...]]:
    return {field.number: shape(field) for field in message.fields if field.number < 100}


def test_clients_of_the_first_contract_are_not_broken(tmp_path: Path) -> None:
    """`first_contract.binpb` is what `buf build` made of the first version of protos/, with the packages of
    Go and Java added, which that version did not name. The same comparison finds what is missing where a
    field of it is gone.
    """
    compared = buf("breaking", "--against", str(FIRST))
    assert (compared.returncode, compared.stdout) == (0, ""), compared.stdout + compared.stderr
    changed = FileDescriptorSet.FromString(FIRST.read_bytes())
    (file,) = [one for one in changed.file if one.name == "penstock/v1/inference.proto"]
    added = file.message_type[0].field.add()
    added.CopyFrom(file.message_type[0].field[0])
    added.name, added.json_name, added.number = "gone", "gone", 1000
    image = tmp_path / "changed.binpb"
    image.write_bytes(changed.SerializeToString())
    compared = buf("breaking", "--against", str(image))
    assert compared.returncode != 0
    assert '"1000" with name "gone"' in compared.stdout


def test_generate_and_stream_requests_are_twins() -> None:
    generate, stream = inference_pb2.GenerateRequest.DESCRIPTOR, inference_pb2.StreamRequest.DESCRIPTOR
    assert shared_part(generate) == shared_part(stream)
    assert (
        len(shared_part(generate)) == len(generate.fields) > 0
    )  # Generate has nothing beyond the shared part

    reserved = []
    for message in (generate, stream):
        proto = DescriptorProto()
        message.CopyToProto(proto)
        reserved.append([(numbers.start, numbers.end) for numbers in proto.reserved_range])
    assert reserved[0] == reserved[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_enums_start_unspecified(file: FileDescriptor) -> None:
    nested = [enum for message in file.message_types_by_name.values() for enum in message.enum_types]
    for enum in [*file.enum_types_by_name.values(), *nested]:
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_buf_lint_passes() -> None:
    lint = buf("lint")
    assert lint.returncode == 0, lint.stdout + lint.stderr


def test_checked_in_code_is_what_the_files_generate(tmp_path: Path) -> None:
    generate = buf("generate", "--output", str(tmp_path))
    assert generate.returncode == 0, generate.stderr
    fresh = tmp_path / GENERATED.relative_to(REPOSITORY)
    names = {path.name for path in GENERATED.glob("*_pb2*.py*")} | {path.name for path in fresh.iterdir()}
    _, different, missing = filecmp.cmpfiles(GENERATED, fresh, names, shallow=False)
    assert (different, missing) == ([], []), "run `make proto`"


def test_checked_in_code_of_gateways_and_groups_is_what_the_files_generate(tmp_path: Path) -> None:
    generate = buf("generate", "--template", "buf.gen.gateways.yaml", "--output", str(tmp_path))
    assert generate.returncode == 0, generate.stderr
    for folder in (GATEWAYS, GATEWAYS.with_name("group")):
        fresh = tmp_path / folder.relative_to(REPOSITORY)
        names = {path.name for path in folder.glob("*_pb2.py*")} | {path.name for path in fresh.iterdir()}
        assert names
        _, different, missing = filecmp.cmpfiles(folder, fresh, names, shallow=False)
        assert (different, missing) == ([], []), "run `make proto`"


def test_the_client_allows_exactly_the_libraries_that_the_code_is_generated_for() -> None:
    """Code that is generated for a newer library would fail at import. Code for an older one would support
    more than anybody tests.
    """
    project = tomllib.loads((REPOSITORY / "clients/python/pyproject.toml").read_text())["project"]
    allowed = {wanted.name: wanted.specifier for wanted in map(Requirement, project["dependencies"])}

    def lowest(name: str) -> Version:
        return min(Version(clause.version) for clause in allowed[name] if clause.operator == ">=")

    assert lowest("grpcio") == Version(inference_pb2_grpc.GRPC_GENERATED_VERSION)
    line = next(
        line for line in (GENERATED / "types_pb2.py").read_text().splitlines() if "Python Version" in line
    )
    assert lowest("protobuf") == Version(line.rpartition(" ")[2])
    assert Version(grpc.__version__) in allowed["grpcio"]
    assert Version(google.protobuf.__version__) in allowed["protobuf"]
