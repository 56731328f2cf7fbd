"""What is read of an xplane file. The files are made by protobuf itself, from the messages as they are
published.
"""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from penstock.runtime.profiling.operations import MalformedTrace, Operation, read_operations, scope_of

FIELD = descriptor_pb2.FieldDescriptorProto
# The messages, with those of their fields that matter here: (name, number, type, message type, repeated).
MESSAGES: dict[str, list[tuple[str, int, int, str, bool]]] = {
    "OpMetadata": [
        ("op_type", 1, FIELD.TYPE_STRING, "", False),
        ("op_name", 2, FIELD.TYPE_STRING, "", False),
    ],
    "Instruction": [
        ("name", 1, FIELD.TYPE_STRING, "", False),
        ("opcode", 2, FIELD.TYPE_STRING, "", False),
        ("metadata", 7, FIELD.TYPE_MESSAGE, "OpMetadata", False),
        ("custom_call_target", 28, FIELD.TYPE_STRING, "", False),
        ("id", 35, FIELD.TYPE_INT64, "", False),
    ],
    "Computation": [
        ("name", 1, FIELD.TYPE_STRING, "", False),
        ("instructions", 2, FIELD.TYPE_MESSAGE, "Instruction", True),
    ],
    "Module": [
        ("name", 1, FIELD.TYPE_STRING, "", False),
        ("computations", 3, FIELD.TYPE_MESSAGE, "Computation", True),
        ("id", 5, FIELD.TYPE_INT64, "", False),
    ],
    "HloProto": [("hlo_module", 1, FIELD.TYPE_MESSAGE, "Module", False)],
    "XStat": [
        ("metadata_id", 1, FIELD.TYPE_INT64, "", False),
        ("double_value", 2, FIELD.TYPE_DOUBLE, "", False),
        ("int64_value", 4, FIELD.TYPE_INT64, "", False),
        ("bytes_value", 6, FIELD.TYPE_BYTES, "", False),
    ],
    "XEventMetadata": [
        ("id", 1, FIELD.TYPE_INT64, "", False),
        ("name", 2, FIELD.TYPE_STRING, "", False),
        ("stats", 5, FIELD.TYPE_MESSAGE, "XStat", True),
    ],
    "Entry": [
        ("key", 1, FIELD.TYPE_INT64, "", False),
        ("value", 2, FIELD.TYPE_MESSAGE, "XEventMetadata", False),
    ],
    "XPlane": [
        ("id", 1, FIELD.TYPE_INT64, "", False),
        ("name", 2, FIELD.TYPE_STRING, "", False),
        ("event_metadata", 4, FIELD.TYPE_MESSAGE, "Entry", True),
    ],
    "XSpace": [
        ("planes", 1, FIELD.TYPE_MESSAGE, "XPlane", True),
        ("hostnames", 4, FIELD.TYPE_STRING, "", True),
    ],
}


def message_types() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="xplane_of_test.proto", package="test", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of, repeated in fields:
            label = FIELD.LABEL_REPEATED if repeated else FIELD.LABEL_OPTIONAL
            added = message.field.add(name=field, number=number, label=label)
            added.type = kind  # type: ignore[assignment]
            if of:
                added.type_name = f".test.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"test.{name}")) for name in MESSAGES
    }


TYPES = message_types()


def xplane(instructions: list[Any], *, plane: str = "/host:metadata") -> bytes:
    """Make a file with one program, "jit_window"."""
    module = TYPES["Module"](
        name="jit_window", id=17, computations=[TYPES["Computation"](name="main", instructions=instructions)]
    )
    hlo = TYPES["HloProto"](hlo_module=module).SerializeToString()
    metadata = TYPES["XEventMetadata"](
        id=17,
        name="jit_window(17)",
        stats=[
            TYPES["XStat"](metadata_id=1, double_value=0.5),
            TYPES["XStat"](metadata_id=2, bytes_value=hlo),
        ],
    )
    planes = [
        TYPES["XPlane"](name="/host:CPU", id=1),
        TYPES["XPlane"](name=plane, id=2, event_metadata=[TYPES["Entry"](key=17, value=metadata)]),
    ]
    result: bytes = TYPES["XSpace"](planes=planes, hostnames=["h"]).SerializeToString()
    return result


def instruction(name: str, opcode: str, op_name: str = "", target: str = "") -> Any:
    made = TYPES["Instruction"](name=name, opcode=opcode, custom_call_target=target, id=-3)
    if op_name:
        made.metadata.op_name = op_name
        made.metadata.op_type = "x"
    return made


def test_scopes_and_kernels_of_the_instructions() -> None:
    found = read_operations(
        xplane(
            [
                instruction(
                    "ffi_call.3",
                    "custom-call",
                    "jit(window)/while/body/model/mlp/ffi_call",
                    "penstock_linear",
                ),
                instruction("while.1", "while", "jit(window)/while/body/sampler/while"),
                instruction("add.2", "add", "jit(window)/while/body/sampler/add"),
                instruction("copy.9", "copy"),
            ]
        ),
        {"jit_window"},
    )
    assert found == {
        ("jit_window", "ffi_call.3"): Operation("model/mlp", "penstock_linear", is_container=False),
        ("jit_window", "while.1"): Operation("sampler", "", is_container=True),
        ("jit_window", "add.2"): Operation("sampler", "", is_container=False),
        ("jit_window", "copy.9"): Operation("", "", is_container=False),
    }
    assert [operation.part for operation in found.values()] == ["model", "", "sampler", ""]


def test_only_the_plane_of_programs_is_read_and_of_it_those_that_are_asked_for() -> None:
    add = [instruction("add.2", "add", "jit(f)/model/add")]
    assert read_operations(xplane(add, plane="/device:GPU:0"), {"jit_window"}) == {}
    assert read_operations(xplane(add), {"jit_forward"}) == {}


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(window)/while/body/model/attention/ffi_call", "model/attention"),
        ("jit(f)/sampler/cond/branch_1_fun/vmap(jit(_uniform))/vmap()/while", "sampler"),
        ("jit(f)/sampler/vmap()/vmap(jit(_threefry_fold_in))/uniforms.<locals>.of/while", "sampler"),
        ("jit(f)/add", ""),
        ("add", ""),
        ("", ""),
    ],
)
def test_what_jax_adds_to_names_is_left_out(op_name: str, scope: str) -> None:
    assert scope_of(op_name) == scope


def test_a_damaged_file_is_refused() -> None:
    whole = xplane([instruction("add.2", "add", "jit(f)/model/add")])
    refused = 0
    for end in range(len(whole)):
        try:
            read_operations(whole[:end], {"jit_window"})
        except MalformedTrace:
            refused += 1
    assert refused > len(whole) * 0.9  # where a plane ends, the rest may be missing unnoticed
    with pytest.raises(MalformedTrace, match="wire type"):
        read_operations(b"\x0b", ())
