"""Coding agents work through the front with a model that says what a script tells it to.

The demo model finds no call that an agent could use. So the server has the fake engine, and of the agents'
prompts, which are long and never the same, the chat template keeps what the script goes by: the questions,
the reasoning that comes back, and which commands' results came back.
"""

from __future__ import annotations

import asyncio
import json
import os
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.service.codecs import MARKERS, QWEN_VOCAB, byte_codec
from tests.service.openai.outside.demo_front import TOOL_S
from tests.service.openai.outside.npm import node_packages
from tests.service.openai.outside.outcomes import judge, read
from tests.service.openai.rig import front_rig
from tests.service.rig import fake

pytestmark = pytest.mark.sweep
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}"
    "{% for word in ['greet', 'add', 'both', 'think', 'again'] if 'script:' ~ word in m.content %}"
    "/{{ word }}{% endfor %}"
    "{% elif m.role == 'tool' %}"
    "{% if 'sum-42' in m.content %}+sum{% elif 'café ☕' in m.content %}+café"
    "{% else %}?{{ m.content }}{% endif %}"
    "{% elif m.reasoning_content %}+{{ m.reasoning_content }}"
    "{% endif %}{% endfor %}{# The model's forms: <think> </think> <tool_call> #}"
)
SUM, CAFÉ = "sleep 1; echo sum-$((6 * 7))", "printf 'caf\\303\\251 \\342\\230\\225'"
"""Commands of a shell, neither of which has in itself what it writes. The first one ends last."""
CHECKS = {
    "text": (["greet"], "Hello from the script."),
    "command": (["add"], "The sum is forty-two."),
    "two_commands_at_once": (["both"], "Both are done."),
    "reasoning_comes_back": (["think"], "It was thought over."),
    "session_is_resumed": (["add", "again"], "That was another process."),
}
"""The questions of each check, the second of which goes on with the session; and the last answer to them."""


@dataclass(frozen=True)
class Agent:
    """How an agent is called. $URL in its texts is the front's, and $HOME a folder of its own."""

    package: str
    program: str
    command: str
    """The argument of `tool` that is a command for a shell."""
    tool: str
    options: Sequence[str]
    goes_on: Sequence[str]
    """What goes before the question, to go on with the last session."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else `tool` is given."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Its settings, in $HOME."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment."""

    def calls(self, *commands: str) -> str:
        """Make an answer that has the agent run these commands."""
        made = ({"name": self.tool, "arguments": {self.command: one, **self.more}} for one in commands)
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in made)

    def script(self) -> Mapping[str, str]:
        """Return what the model answers to each prompt that TEMPLATE makes."""
        return {
            "/greet": "Hello from the script.",
            "/add": self.calls(SUM),
            "/add+sum": "The sum is forty-two.",
            "/both": "I will do both.\n" + self.calls(SUM, CAFÉ),
            "/both+sum+café": "Both are done.",
            "/think": "<think>\nHm.\n</think>\n\n" + self.calls(SUM),
            "/think+Hm.+sum": "It was thought over.",
            "/add+sum/again": self.calls(CAFÉ),
            "/add+sum/again+café": "That was another process.",
        }


AGENTS = {
    "codex": Agent(
        package="@openai/codex",
        program="codex",
        tool="exec_command",
        command="cmd",
        options=["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"],
        goes_on=["resume", "--last"],
        files={
            "config.toml": 'model = "fake"\nmodel_provider = "penstock"\n[model_providers.penstock]\n'
            'name = "Penstock"\nbase_url = "$URL/v1"\nwire_api = "responses"\nenv_key = "PENSTOCK_TOKEN"\n'
        },
        variables={"CODEX_HOME": "$HOME", "PENSTOCK_TOKEN": "none"},
    ),
    "claude-code": Agent(
        package="@anthropic-ai/claude-code",
        program="claude",
        tool="Bash",
        command="command",
        more={"description": "Runs it"},
        options=["--print", "--permission-mode", "acceptEdits", "--allowedTools=Bash"],
        goes_on=["--continue"],
        variables={
            "CLAUDE_CONFIG_DIR": "$HOME",
            "ANTHROPIC_BASE_URL": "$URL",
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": "fake",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "opencode": Agent(
        package="opencode-ai",
        program="opencode",
        tool="bash",
        command="command",
        more={"description": "Runs it"},
        options=["run"],
        goes_on=["--continue"],
        files={
            "opencode.json": '{"model": "penstock/fake", "provider": {"penstock": {'
            '"npm": "@ai-sdk/openai-compatible", '
            '"options": {"baseURL": "$URL/v1", "apiKey": "none"}, "models": {"fake": {}}}}}'
        },
        variables={
            "XDG_DATA_HOME": "$HOME",
            "XDG_CONFIG_HOME": "$HOME",
            "XDG_STATE_HOME": "$HOME",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
    ),
    "qwen-code": Agent(
        package="@qwen-code/qwen-code",
        program="qwen",
        tool="run_shell_command",
        command="command",
        more={"is_background": False},
        options=["--yolo", "--auth-type", "openai"],
        goes_on=["--continue"],
        variables={
            "HOME": "$HOME",
            "OPENAI_BASE_URL": "$URL/v1",
            "OPENAI_API_KEY": "none",
            "OPENAI_MODEL": "fake",
        },
    ),
}


@pytest.mark.parametrize("name", AGENTS)
async def test_a_script_of_turns(name: str, tmp_path: Path) -> None:
    agent = AGENTS[name]
    folder = node_packages(tmp_path, f"{agent.package}@{read(name).version}")
    codec = byte_codec(TEMPLATE, MARKERS)
    scripts = {
        prompt: codec.encode(text, add_special_tokens=False) for prompt, text in agent.script().items()
    }
    engine = fake(codec=codec, vocab_size=QWEN_VOCAB, max_model_len=10_000, scripts=scripts)
    outcomes: dict[str, str | None] = {}
    async with front_rig(engine) as rig:
        for check, (questions, answer) in CHECKS.items():
            home = tmp_path / check
            home.mkdir()
            outcomes[check] = await run(agent, folder, home, rig.url, questions, answer)
    judge(name, outcomes)


async def run(
    agent: Agent, folder: Path, home: Path, url: str, questions: Sequence[str], answer: str
) -> str | None:
    """Return what is wrong with an agent's last answer to these questions, or None."""

    def said(text: str) -> str:
        return string.Template(text).substitute(URL=url, HOME=home)

    for name, text in agent.files.items():
        (home / name).write_text(said(text))
    told = ""
    for i, question in enumerate(questions):
        words_before = [*agent.options, *(agent.goes_on if i else ())]
        process = await asyncio.create_subprocess_exec(
            folder / "node_modules" / ".bin" / agent.program,
            *words_before,
            f"script:{question}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=home,
            env=os.environ
            | {"PWD": str(home)}
            | {name: said(value) for name, value in agent.variables.items()},
        )
        try:
            async with asyncio.timeout(TOOL_S):
                out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        told = out.decode().strip()
        if process.returncode:
            return f"exit {process.returncode}: {told}\n{err.decode()}"
    is_answer = told.splitlines()[-1:] == [answer]  # some agents print what was said before it, too
    return None if is_answer else f"{told!r} and not {answer!r}\n{err.decode()}"
