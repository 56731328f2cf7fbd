"""Draws the pictures of README and docs/: a terminal from a real run, and the path of a request.

    python -m tools.site.pictures

It starts a server of the demo model, runs the commands below against it, and writes docs/images/*.svg.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
TOOL = '{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}'
COMMANDS: Sequence[tuple[str, Sequence[str]]] = (
    (
        'penstock generate --chat "what is 3 + 4?" --temperature 0',
        ["generate", "--chat", "what is 3 + 4?", "--temperature", "0"],
    ),
    (
        'penstock generate "Once upon a time" --max-tokens 60 --seed 7',
        ["generate", "Once upon a time", "--max-tokens", "60", "--seed", "7"],
    ),
    (
        'penstock generate "what\'s the weather in Paris?" --tools weather.json --temperature 0',
        ["generate", "what's the weather in Paris?", "--tools", TOOL, "--temperature", "0"],
    ),
    (
        'penstock generate "Her number is " --regex "0[0-9]{3}-[0-9]{5}" --seed 7',
        ["generate", "Her number is ", "--regex", "0[0-9]{3}-[0-9]{5}", "--seed", "7"],
    ),
    ("penstock health", ["health"]),
)
"""What the picture shows as typed, and what is run."""
COLUMNS, LINE, LETTER, MARGIN, BAR = 92, 19, 8.1, 16, 34
LINE_STYLE = 'stroke="#888" stroke-width="1.6" marker-end="url(#tip)"'

STAGES = (
    ("client", "encodes the request"),
    ("interceptor", "who calls, is there a place, one table of errors"),
    ("conversion", "check, render, tokenize, truncate, compile the grammar"),
    ("queue", "one sequence for each output, by rank"),
    ("scheduler", "a plan for each step: rows, tokens, KV pages"),
    ("runner", "one buffer, the smallest compiled program that fits"),
    ("step", "the model, then the sampler, on the device"),
    ("delivery", "tokens to text, stop strings, reasoning, calls"),
)
"""The path of a request; the last leads back to the first."""


def penstock(*arguments: str, addr: str = "") -> str:
    """Run the command and return what it prints."""
    command = [sys.executable, "-m", "penstock.cli", *arguments]
    environment = {**os.environ, "PENSTOCK_ADDR": addr}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=120)
    return done.stdout


@contextlib.contextmanager
def demo_server(*flags: str) -> Iterator[str]:
    """Run a server of the demo model, and yield its address."""
    serve = [sys.executable, "-u", "-m", "penstock.cli", "serve", "demo", "--port", "0", *flags]
    with subprocess.Popen(
        [*serve, "--log-level", "error"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield next(found[1] for line in server.stdout if (found := re.search(r"ready on (\S+)", line)))
        finally:
            server.terminate()


def session() -> list[tuple[str, str]]:
    """Return (command as typed, its output), from a server that is started for it."""
    with demo_server() as addr:
        return [(typed, penstock(*run, addr=addr)) for typed, run in COMMANDS]


def wrapped(text: str) -> Iterator[str]:
    """Break a text into lines of at most COLUMNS characters; words are kept whole where they can be."""
    for line in text.rstrip("\n").split("\n"):
        while len(line) > COLUMNS:
            at = line.rfind(" ", 0, COLUMNS + 1)
            at = at if at > 0 else COLUMNS
            yield line[:at]
            line = line[at:].lstrip(" ")
        yield line


def terminal(shown: Sequence[tuple[str, str]]) -> str:
    """Draw an SVG of a terminal in which these commands were typed."""
    lines: list[tuple[str, str]] = []
    for typed, output in shown:
        lines += [("typed", f"$ {typed}")]
        lines += [("said", line) for line in wrapped(output)]
        lines += [("said", "")]
    lines.pop()
    width = round(COLUMNS * LETTER + 2 * MARGIN)
    height = BAR + len(lines) * LINE + MARGIN
    colors = {"typed": "#7ee787", "said": "#e6edf3"}
    texts = "\n".join(
        f'<text x="{MARGIN}" y="{BAR + (i + 1) * LINE - 5}" fill="{colors[kind]}">{escape(text)}</text>'
        for i, (kind, text) in enumerate(lines)
    )
    dots = "".join(
        f'<circle cx="{20 + 18 * i}" cy="17" r="5.5" fill="{color}"/>'
        for i, color in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="ui-monospace, Menlo, Consolas, monospace" font-size="13.5" '
        f'xml:space="preserve">\n<rect width="{width}" height="{height}" rx="8" fill="#161b22"/>\n'
        f"{dots}\n{texts}\n</svg>\n"
    )


def path() -> str:
    """Draw an SVG of the stages that a request passes."""
    width, step, box = 640, 58, 40
    height = len(STAGES) * step + 10
    tip = (
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="4" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#888"/></marker></defs>'
    )
    parts = [tip]
    for i, (name, what) in enumerate(STAGES):
        y = 8 + i * step
        parts.append(f'<rect x="60" y="{y}" width="130" height="{box}" rx="6" fill="#2f6f9f"/>')
        parts.append(
            f'<text x="125" y="{y + 25}" fill="#fff" text-anchor="middle" font-weight="600">'
            f"{escape(name)}</text>"
        )
        parts.append(f'<text x="206" y="{y + 25}" fill="#888">{escape(what)}</text>')
        if i + 1 < len(STAGES):
            parts.append(f'<path d="M125,{y + box} V{y + step - 4}" {LINE_STYLE}/>')
    last = 8 + (len(STAGES) - 1) * step + box / 2
    parts.append(f'<path d="M60,{last} H28 V28 H54" fill="none" {LINE_STYLE}/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="14">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "request.svg").write_text(path(), encoding="utf-8")
    (IMAGES / "terminal.svg").write_text(terminal(session()), encoding="utf-8")


if __name__ == "__main__":
    main()
