"""Counts what a program for a TPU moves to and from the chip's large memory, from its compiled HLO, and finds
weights that a program for any chip expands in memory.

XLA's own count has each weight two or three times that is first fetched to the small memory on the chip, and
whole arrays of which a step reads a few rows. Here an instruction counts its arguments and results in the
large memory. Of an argument that it only looks up or slices, what it takes counts, and nothing of arrays that
are `beside`. What happens within a fusion moves nothing. The body of a loop counts once, and of a condition
the branch that moves least: that of a step in which no request asks for more than the likeliest token. What a
step fetches at its end for the next one counts there, and not where the next one would fetch it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<rest>.*)$")
_ARRAY = re.compile(r"(?P<kind>pred|bf16|[suf]\d+(?:e\w+)?)\[(?P<dims>[\d,]*)\](?P<layout>\{[^}]*\})?")
_OPERATION = re.compile(r" (?P<operation>[a-z][\w-]*)\((?P<rest>.*)$")
_CALLED = re.compile(r"(?:calls|body|to_apply)=%?(?P<name>[\w.-]+)")
_BRANCHES = re.compile(
    r"branch_computations=\{(?P<names>[^}]*)\}|(?:true|false)_computation=%?(?P<name>[\w.-]+)"
)
_ON_CHIP = re.compile(r"S\([1-9]\)")
_EARLY = "cross_program_prefetch_index="
"""Of a copy that is already done if the same program ran before."""
_FREE = frozenset(
    (
        "parameter",
        "constant",
        "iota",
        "partition-id",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "opt-barrier",
        "add-dependency",
    )
)
"""Operations that move nothing."""
_PASSES = frozenset(("while", "conditional", "call", "copy-done"))
"""Operations whose results others have made."""
_TAKES = frozenset(("gather", "dynamic-slice", "slice"))
"""Operations that move of their first argument only what they return."""


@dataclass(frozen=True, slots=True)
class _Array:
    kind: str
    dims: str
    is_on_chip: bool

    @property
    def num_bytes(self) -> int:
        """Its bytes, wherever it lies."""
        bits = 8 if self.kind == "pred" else int(re.findall(r"\d+", self.kind)[0])
        return self.size * bits // 8

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(int(size) for size in self.dims.split(",") if size)


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    operation: str
    results: tuple[_Array, ...]
    arguments: tuple[str, ...]
    text: str


_Computations = Mapping[str, list[_Instruction]]


def moved_bytes(text: str, beside: Collection[str]) -> int:
    """Count the bytes. `beside`: the sizes of arrays that do not count, such as "1024,2,8,64,128"."""
    return sum(moved_by(text, beside).values())


def moved_by(text: str, beside: Collection[str]) -> dict[str, int]:
    """Count the bytes of each instruction of the program that moves some, with its kind before its name; one
    that runs others counts what they move.
    """
    computations, entry = _read(text)
    return _of_computation(entry, computations, beside)


def widened(text: str, sizes: Collection[int]) -> list[str]:
    """Tell which arrays of so many numbers a program makes in memory with more than 8 bits for each: what
    weights of these sizes in 8 bits are where they are expanded, in whatever shape. What happens within a
    fusion is not in memory.
    """
    computations, _ = _read(text)
    fused = {
        called["name"]
        for of_one in computations.values()
        for each in of_one
        if each.operation == "fusion" and (called := _CALLED.search(each.text))
    }
    found = set()
    for name, instructions in computations.items():
        for each in () if name in fused else instructions:
            if each.operation in _FREE or each.operation in _PASSES:
                continue
            found |= {
                f"{each.operation} {array.kind}[{array.dims}]"
                for array in each.results
                if array.size in sizes and array.num_bytes > array.size
            }
    return sorted(found)


def _of_computation(name: str, computations: _Computations, beside: Collection[str]) -> dict[str, int]:
    named = {each.name: each for each in computations[name]}
    fetched = [each.arguments for each in computations[name] if each.operation == "copy-start"]
    found = {}
    for each in computations[name]:
        if _EARLY in each.text and fetched.count(each.arguments) > 1:
            continue  # it was fetched at the end of the step before
        if moved := _of_instruction(each, named, computations, beside):
            found[f"{each.operation} {each.name}"] = moved
    return found


def _read(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    """Return the instructions of each computation, and which is the program."""
    found: dict[str, list[_Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if began := _COMPUTATION.match(line):
            current = found.setdefault(began["name"], [])
            entry = began["name"] if began["entry"] else entry
        elif (matched := _INSTRUCTION.match(line)) and (operation := _OPERATION.search(matched["rest"])):
            shapes = _ARRAY.finditer(matched["rest"][: operation.start()])
            results = tuple(
                _Array(each["kind"], each["dims"], bool(_ON_CHIP.search(each["layout"] or "")))
                for each in shapes
            )
            given = re.findall(r"%([\w.-]+)", _within(operation["rest"]))
            current.append(
                _Instruction(matched["name"], operation["operation"], results, tuple(given), matched["rest"])
            )
    return found, entry


def _within(text: str) -> str:
    """Return what stands before the bracket that ends the arguments."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i]
    return text


def _branches(text: str) -> list[str]:
    found: list[str] = []
    for match in _BRANCHES.finditer(text):
        found += [match["name"]] if match["name"] else re.findall(r"%?([\w.-]+)", match["names"])
    return found


def _of_instruction(
    each: _Instruction,
    named: Mapping[str, _Instruction],
    computations: _Computations,
    beside: Collection[str],
) -> int:
    def of(name: str) -> int:
        return sum(_of_computation(name, computations, beside).values())

    operation, called = each.operation, _CALLED.search(each.text)
    if operation == "conditional":
        return min(map(of, _branches(each.text)))
    if operation in ("while", "call"):
        return of(called["name"]) if called else 0
    if operation in _FREE or operation.endswith(("-done", "-update")):
        return 0
    if operation.endswith("-start"):  # its results begin with where it takes and where it goes
        moved = min((array.num_bytes for array in each.results[:2]), default=0)
        return moved * sum(not array.is_on_chip for array in each.results[:2])
    total = sum(_in_large(array, beside) for array in each.results)
    within = computations.get(called["name"], []) if called and operation == "fusion" else None
    for number, name in enumerate(each.arguments):
        if name not in named:
            continue
        size = sum(_in_large(array, beside) for array in named[name].results)
        if size and operation in _TAKES and number == 0:
            size = min(size, sum(array.num_bytes for array in each.results))
        elif size and within is not None:
            size = min(size, _taken(within, number, size))
        total += size
    return total


def _in_large(array: _Array, beside: Collection[str]) -> int:
    """Return the array's bytes if it lies in the large memory and counts."""
    return 0 if array.is_on_chip or array.dims in beside else array.num_bytes


def _taken(within: list[_Instruction], number: int, size: int) -> int:
    """Tell how much a fusion takes of an argument of so many bytes."""
    (parameter,) = (
        each.name for each in within if each.operation == "parameter" and f" parameter({number})" in each.text
    )
    names, total = {parameter}, 0
    for each in within:
        if not names.intersection(each.arguments):
            continue
        if each.operation in ("bitcast", "copy", "reshape"):
            names.add(each.name)
        elif each.operation in _TAKES and each.arguments[0] in names:
            total += sum(array.num_bytes for array in each.results)
        else:
            return size
    return total
