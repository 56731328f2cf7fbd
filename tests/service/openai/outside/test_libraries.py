"""Clients of OpenAI and Anthropic, and LiteLLM, LangChain, LangGraph, the OpenAI Agents SDK, AutoGen,
Semantic Kernel, Instructor, guidance and lm-evaluation-harness call the front. Each has an environment of its
own, so that they are drawn one by one.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import openai
import pytest

from tests.deploy.environments import environment
from tests.service.openai.outside.demo_front import (
    DRIVERS,
    Endpoint,
    finish,
    outcomes_of,
    python_driver,
)
from tests.service.openai.outside.npm import node_packages
from tests.service.openai.outside.outcomes import judge, read


@pytest.mark.sweep
def test_openai_for_python(endpoint: Endpoint, tmp_path: Path) -> None:
    assert read("openai-python").version == openai.__version__, "the file tells of another version"
    judge("openai-python", python_driver(sys.executable, "openai_checks", endpoint, tmp_path))


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "package"), [("openai", "openai"), ("anthropic", "@anthropic-ai/sdk")])
def test_client_for_node(name: str, package: str, endpoint: Endpoint, tmp_path: Path) -> None:
    folder = node_packages(tmp_path, f"{package}@{read(f'{name}-node').version}", "zod@4.6.7")
    script = folder / f"{name}_checks.mjs"
    shutil.copyfile(DRIVERS / script.name, script)
    done = finish(["node", script, endpoint.api, endpoint.model, endpoint.key], tmp_path)
    judge(f"{name}-node", outcomes_of(done))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "packages", "driver"),
    [
        ("anthropic-python", ["anthropic"], "anthropic_checks"),
        ("litellm", ["litellm"], "litellm_checks"),
        ("langchain", ["langchain-openai"], "langchain_checks"),
        ("langchain-anthropic", ["langchain-anthropic"], "langchain_anthropic_checks"),
        ("agents", ["openai-agents"], "agents_checks"),
        ("instructor", ["instructor"], "instructor_checks"),
        ("autogen", ["autogen-agentchat", "autogen-ext[openai]"], "autogen_checks"),
        ("semantic-kernel", ["semantic-kernel"], "semantic_kernel_checks"),
        ("langgraph", ["langgraph-supervisor", "langchain", "langchain-openai"], "langgraph_checks"),
        ("guidance", ["guidance", f"openai=={openai.__version__}"], "guidance_checks"),
        ("lm-eval", ["lm_eval[api]"], "lm_eval_checks"),
    ],
    ids=[
        "Anthropic",
        "LiteLLM",
        "LangChain",
        "LangChain on Anthropic",
        "OpenAI Agents SDK",
        "Instructor",
        "AutoGen",
        "Semantic Kernel",
        "LangGraph",
        "guidance",
        "lm-evaluation-harness",
    ],
)
def test_library(name: str, packages: Sequence[str], driver: str, endpoint: Endpoint, tmp_path: Path) -> None:
    first, *others = packages
    python = environment(f"{first}=={read(name).version}", *others) / "bin" / "python"
    judge(name, python_driver(python, driver, endpoint, tmp_path))
