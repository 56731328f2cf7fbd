"""Makes the report of a run: a page that somebody without the machine can mend things by."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.on_device.steps import SAID, Outcome, Stage

_LAST_LINES = 12
_LONGEST = 300
_DUMP = "Fatal Python error"
"""How the report of PYTHONFAULTHANDLER begins, when a process has crashed or was aborted because it hung."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<function>.+)$', re.MULTILINE)
_RAISED = re.compile(r"^(?:E\s+)?[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Failed|Abort|Timeout)\b.*$")


def report(head: Sequence[str], stages: Sequence[Stage], outcomes: Mapping[str, Outcome], root: Path) -> str:
    """Write the page in Markdown. A step without an outcome was not reached. `root`: the checkout."""
    steps = [step for stage in stages for step in stage.steps]
    known = {step.name: outcomes.get(step.name) or _not_reached(step.name) for step in steps}
    parts = [
        "# A run on a device",
        "\n".join(f"- {line}" for line in head),
        _summary(list(known.values()), root),
    ]
    for stage in stages:
        details = _details([known[step.name] for step in stage.steps])
        parts += [f"## {stage.title}", *details] if details else []
    broken = [each for each in known.values() if each.state in ("failed", "killed")]
    parts.append("## What failed, and why")
    parts += [_failure(each, root) for each in broken] or ["Nothing of what ran."]
    missed = [each.name for each in known.values() if each.state == "not reached"]
    parts.append("## Not reached")
    parts.append(", ".join(missed) if missed else "Everything was reached.")
    return "\n\n".join(parts) + "\n"


def _not_reached(name: str) -> Outcome:
    return Outcome(name=name, state="not reached")


def _summary(outcomes: Sequence[Outcome], root: Path) -> str:
    rows = [
        {
            "step": each.name,
            "state": each.state,
            "s": f"{each.seconds:.1f}",
            "what it says": _says(each, root),
        }
        for each in outcomes
    ]
    return table(rows)


def _says(outcome: Outcome, root: Path) -> str:
    """Return the step's own sentence, or else the last line of its output; and how it ended."""
    lines = [line for line in outcome.output.splitlines() if line.strip()] or [""]
    said = str(outcome.result.get(SAID, "" if outcome.result else lines[-1]))
    raised = why(outcome.output, root)[0] if outcome.state == "failed" else ""
    return ". ".join(text[:_LONGEST] for text in dict.fromkeys((said, outcome.how, raised)) if text)


def _details(outcomes: Sequence[Outcome]) -> list[str]:
    """Write the figures of a stage's steps beside their sentences. Steps with single figures share a table;
    of the others, single figures are a list, and lists of rows are tables.
    """
    found = [
        (each.name, {name: value for name, value in each.result.items() if name != SAID}) for each in outcomes
    ]
    flat = [
        {"step": name, **figures}
        for name, figures in found
        if figures and not any(map(_is_large, figures.values()))
    ]
    parts = [table(flat)] if len(flat) > 1 else []
    in_table = {row["step"] for row in flat} if parts else set()
    for name, figures in found:
        if figures and name not in in_table:
            parts.append(f"### {name}")
            single = [f"- {key}: {_cell(value)}" for key, value in figures.items() if not _is_rows(value)]
            parts += ["\n".join(single)] if single else []
            parts += [f"{key}:\n\n{table(value)}" for key, value in figures.items() if _is_rows(value)]
    return parts


def _is_large(value: Any) -> bool:
    return isinstance(value, list | dict)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a table in Markdown. The columns are those of all rows, in the order in which they come
    up.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_cell(row.get(name, "")) for name in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _failure(outcome: Outcome, root: Path) -> str:
    raised, frame = why(outcome.output, root)
    # Where Python tells where it hangs, that is long, and `frame` has the place; what came before says more.
    before = outcome.output.partition(_DUMP)[0]
    lines = [line[:_LONGEST] for line in before.splitlines() if line.strip()][-_LAST_LINES:]
    parts = [f"### {outcome.name}: {outcome.how}"]
    parts += [f"- It said: `{raised[:_LONGEST]}`"] if raised else []
    parts += [f"- The last place in our files: `{frame}`"] if frame else []
    parts += (
        ["The end of its output:", "\n".join(["```text", *lines, "```"])]
        if lines
        else ["It printed nothing."]
    )
    return "\n\n".join(parts)


def why(output: str, root: Path) -> tuple[str, str]:
    """Return the last line of an output that names an exception, and the last place in files below `root`
    that a traceback shows; each is empty if there is none.
    """
    raised = _raised(output)
    is_dump = _DUMP in output  # the innermost function comes first there, as no exception is raised
    shown = output.rpartition("Current thread")[2] if is_dump else output
    ours = [found for found in _FRAME.finditer(shown) if _is_ours(Path(found["file"]), root)]
    if not ours:
        return raised[-1].strip() if raised else "", ""
    last = ours[0 if is_dump else -1]
    file = Path(last["file"])
    place = file.relative_to(root) if file.is_absolute() else file
    return raised[-1].strip() if raised else "", f"{place}:{last['line']}, in {last['function']}"


def _raised(output: str) -> list[str]:
    """Return the lines that name an exception: by their form, or because they follow a traceback's frames."""
    found = []
    is_within = False
    for line in output.splitlines():
        begins = line.startswith("Traceback (most recent call last)")
        ends = is_within and bool(line.strip()) and not line.startswith((" ", "Traceback"))
        if ends or _RAISED.match(line):
            found.append(line)
        is_within = begins or (is_within and not ends)
    return found


def _is_ours(file: Path, root: Path) -> bool:
    """Say whether a file is of the checkout, and not of an environment within it."""
    if not file.is_absolute():
        return False
    return file.is_relative_to(root) and not {"site-packages", "site"} & set(file.parts)
