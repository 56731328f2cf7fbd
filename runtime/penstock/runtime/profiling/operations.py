"""Reads from an xplane file, which JAX's profiler writes, what the operations of compiled programs are for.

The file is a protobuf message XSpace (tsl/profiler/protobuf/xplane.proto). One of its planes,
"/host:metadata", holds the programs of the process, each as a message HloProto (xla/service/hlo.proto).
Python has no generated code for either without TensorFlow, and only a few fields are needed, so this module
reads protobuf's wire format itself. It imports the standard library only, because it runs in a process of its
own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

PARTS = ("model", "sampler")
"""The scopes of the step's programs (`jax.named_scope`) of which a trace gets a track each."""

_METADATA_PLANE = b"/host:metadata"
_CONTAINERS = frozenset({"while", "conditional", "call", "async-start", "async-done"})
"""Operations that last as long as the operations within them."""
_WRAPPERS = re.compile(
    r"(jit|pjit|vmap|jvp|transpose)\(.*\)|while|body|cond|branch_\d+_fun|closed_call|.*<locals>.*"
)
"""Components of an operation's name that JAX adds for its own transformations."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Numbers of the fields that are read.
_SPACE_PLANE = 1
_PLANE_NAME, _PLANE_EVENT_METADATA = 2, 4
_MAP_VALUE = 2
_EVENT_METADATA_STAT = 5
_STAT_BYTES = 6
_HLO_MODULE = 1
_MODULE_NAME, _MODULE_COMPUTATION = 1, 3
_COMPUTATION_INSTRUCTION = 2
_INSTRUCTION_NAME, _INSTRUCTION_OPCODE, _INSTRUCTION_METADATA, _INSTRUCTION_TARGET = 1, 2, 7, 28
_OP_METADATA_NAME = 2


class MalformedTrace(ValueError):
    """A file of the profiler is not of the form that this code knows."""


class Operation(NamedTuple):
    """One instruction of a compiled program."""

    scope: str
    """The scopes that the code named around it, as "model/attention"; empty outside of all."""
    target: str
    """What a custom call calls, such as a kernel of `ops.native`; empty for other instructions."""
    is_container: bool
    """Whether it lasts as long as other operations, which are recorded too."""

    @property
    def part(self) -> str:
        """The part of PARTS that it is a piece of; empty for none."""
        first = self.scope.partition("/")[0]
        return first if first in PARTS and not self.is_container else ""


def read_operations(xplane: bytes, programs: Collection[str]) -> dict[tuple[str, str], Operation]:
    """Read the instructions of these programs in the file, by the names of their program and of themselves.
    The file has all programs of the process, of which most did not run while it was recorded, and to read one
    takes milliseconds. MalformedTrace.
    """
    operations: dict[tuple[str, str], Operation] = {}
    for number, plane in _fields(memoryview(xplane)):
        if number == _SPACE_PLANE and _text(plane, _PLANE_NAME) == _METADATA_PLANE.decode():
            for module in _modules(_message(plane)):
                name = _text(module, _MODULE_NAME)
                if name in programs:
                    _add_module(name, module, operations)
    return operations


def _modules(plane: memoryview) -> Iterator[memoryview]:
    """Yield the messages HloModuleProto in a plane."""
    for number, entry in _fields(plane):
        if number != _PLANE_EVENT_METADATA:
            continue
        for _, metadata in _those(_message(entry), _MAP_VALUE):
            for _, stat in _those(_message(metadata), _EVENT_METADATA_STAT):
                for _, hlo in _those(_message(stat), _STAT_BYTES):
                    for _, module in _those(_message(hlo), _HLO_MODULE):
                        yield _message(module)


def _add_module(name: str, module: memoryview, operations: dict[tuple[str, str], Operation]) -> None:
    for _, computation in _those(module, _MODULE_COMPUTATION):
        for _, instruction in _those(_message(computation), _COMPUTATION_INSTRUCTION):
            fields = dict(_fields(_message(instruction)))
            op_name = _text(fields.get(_INSTRUCTION_METADATA, b""), _OP_METADATA_NAME)
            operations[name, _string(fields.get(_INSTRUCTION_NAME, b""))] = Operation(
                scope=scope_of(op_name),
                target=_string(fields.get(_INSTRUCTION_TARGET, b"")),
                is_container=_string(fields.get(_INSTRUCTION_OPCODE, b"")) in _CONTAINERS,
            )


def scope_of(op_name: str) -> str:
    """Return the scopes in the name that JAX gives an operation: "jit(f)/while/body/model/mlp/add" ->
    "model/mlp". The name's last component is the operation itself.
    """
    return "/".join(part for part in op_name.split("/")[:-1] if not _WRAPPERS.fullmatch(part))


def _those(message: memoryview, wanted: int) -> Iterator[tuple[int, int | memoryview]]:
    return (field for field in _fields(message) if field[0] == wanted)


def _text(message: int | memoryview | bytes, wanted: int) -> str:
    """Return a field of text in a message; empty where it has none."""
    return next((_string(value) for _, value in _those(_message(message), wanted)), "")


def _string(value: int | memoryview | bytes) -> str:
    return bytes(_message(value)).decode(errors="replace")


def _message(value: int | memoryview | bytes) -> memoryview:
    if isinstance(value, int):
        raise MalformedTrace("a field that should hold bytes holds a number")
    return memoryview(value)


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the fields of a message in protobuf's wire format, as (number, value)."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        kind = tag & 7
        value: int | memoryview
        if kind == _VARINT:
            value, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
            value, at = message[at : at + size], at + size
        elif kind == _BYTES:
            size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        else:
            raise MalformedTrace(f"a field has the unknown wire type {kind}")
        if at > end:
            raise MalformedTrace("a message ends within a field")
        yield tag >> 3, value


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return (the number that begins at `at`, where it ends)."""
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise MalformedTrace("a number has no end")
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
