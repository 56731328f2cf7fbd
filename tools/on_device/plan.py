"""What is run, in order of worth: the plan for a GPU, and a small one for a CPU on which the run itself is
tried.

The seconds are limits, not estimates. They leave room for W1 even where every golden hangs.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.on_device.steps import Stage, Step

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 8.0
"""The time for which the limits are made."""
OPERATION_TESTS = ("test_kv_rows.py", "test_sampler.py", "test_attention.py", "test_experts.py")
"""Of tests/runtime/ops: they compare what XLA computes with numpy, on any platform."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the steps are."""

    shape: str
    """A shape of bench.checkpoint."""
    shrink: int
    """Divides the workloads' lengths."""
    kv_bytes: int
    goldens_at_once: int
    native: str
    """EngineConfig.native of the workloads."""
    has_kernels: bool
    """Whether the steps for GPUs' kernels are run."""
    patience: float = 1.0
    """Multiplies the limits of steps, and not those of stages."""


SIZES: Mapping[str, Sizes] = {
    "cuda": Sizes(
        shape="qwen3-0.6b", shrink=1, kv_bytes=3 << 30, goldens_at_once=4, native="auto", has_kernels=True
    ),
    "cpu": Sizes(
        shape="tiny",
        shrink=8,
        kv_bytes=64 << 20,
        goldens_at_once=1,
        native="off",
        has_kernels=False,
        patience=4.0,
    ),
}


def stages(
    platform: str,
    *,
    python: str,
    work: Path,
    out: Path,
    only: Collection[str] = (),
    minutes: float = MINUTES,
) -> list[Stage]:
    """Return the plan. `work`: a folder for what stays on the machine; `out`: the one for what comes back.
    With `only`, the steps whose names begin with one of these. With more `minutes`, all limits are longer.
    """
    sizes = SIZES[platform]
    cache, model, facts = (str(work / name) for name in ("xla", "model", "facts.json"))

    def module(name: str, *arguments: str) -> tuple[str, ...]:
        return python, "-m", name, *arguments

    def speed(what: str, *arguments: str) -> tuple[str, ...]:
        folders = (
            "--checkpoint",
            model,
            "--cache",
            cache,
            "--out",
            str(out),
            "--facts",
            facts,
        )
        sized = ("--kv-bytes", str(sizes.kv_bytes), "--shrink", str(sizes.shrink), "--native", sizes.native)
        return module("tools.on_device.speed", what, *folders, *sized, *arguments)

    def tests(*arguments: str) -> tuple[str, ...]:
        quiet = ("-q", "--tb=short", "-p", "no:cacheprovider", "-W", "default")
        return module("pytest", *quiet, *arguments)

    def step(name: str, limit_s: float, command: tuple[str, ...], **variables: str) -> Step:
        return Step(name=name, command=command, limit_s=limit_s, variables=variables)

    # Several processes share the GPU then, so none may take most of its memory at once.
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    checkpoint = module("bench.checkpoint", "--shape", sizes.shape, "--out", model)
    goldens = [
        step(f"golden-{name}", 100, module("tools.on_device.goldens", name, "--cache", cache), **shared)
        for name in kinds()
    ]

    def kernel(what: str, limit_s: float) -> Step:
        return step(f"kernels-{what}", limit_s, module("tools.on_device.kernels", what, "--facts", facts))

    kernels = (
        *(kernel(what, 70) for what in ("operation", "chunks", "experts")),
        step(
            "kernels-tokens",
            100,
            module("tools.on_device.kernels", "tokens", "--checkpoint", model, "--cache", cache),
        ),
    )
    other_kernels = tuple(kernel(what, 60) for what in ("int8", "latents", "int8-chunks", "latent-chunks"))
    plan = [
        Stage(title="The machine", steps=(step("facts", 75, module("tools.on_device.facts")),), limit_s=75),
        Stage(
            title="Goldens: PyTorch's tokens, in float32",
            steps=(step("checkpoint", 60, checkpoint), *goldens),
            limit_s=190,
            at_once=sizes.goldens_at_once,
        ),
        Stage(
            title="Workloads of bench/README.md, in bf16",
            steps=tuple(
                step(name, limit_s, speed("workload", "--name", name))
                for name, limit_s in (("W1", 150), ("W2", 90), ("W3", 60))
            ),
            limit_s=240,
        ),
        Stage(
            title="Kernels for attention and experts, and an engine's tokens with them in bf16",
            steps=kernels if sizes.has_kernels else (),
            limit_s=240,
        ),
        Stage(title="A decode step by operation", steps=(step("profile", 90, speed("profile")),), limit_s=90),
        Stage(title="Memory", steps=(step("memory", 60, speed("memory")),), limit_s=60),
        Stage(
            title="Tests",
            steps=(
                *(step("tests-gpu", 90, tests("-m", "gpu", *files)) for files in [marked()] if files),
                *(
                    step(
                        f"tests-{Path(name).stem}", 90, tests("-m", "not sweep", f"tests/runtime/ops/{name}")
                    )
                    for name in OPERATION_TESTS
                ),
            ),
            limit_s=240,
        ),
        Stage(
            title="Kernels for attention with caches of int8, and with latents",
            steps=other_kernels if sizes.has_kernels else (),
            limit_s=200,
        ),
    ]
    scale = max(1.0, minutes / MINUTES)
    chosen = [
        dataclasses.replace(
            stage,
            limit_s=stage.limit_s * scale,
            steps=tuple(
                dataclasses.replace(each, limit_s=each.limit_s * sizes.patience * scale)
                for each in stage.steps
                if not only or each.name.startswith(tuple(only))
            ),
        )
        for stage in plan
    ]
    return [stage for stage in chosen if stage.steps]


def kinds() -> tuple[str, ...]:
    """Return KINDS of tests/support/goldens.py, which cannot be imported before JAX is there."""
    tree = ast.parse((ROOT / "tests/support/goldens.py").read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["KINDS"]
    )
    found = ast.literal_eval(value)
    return tuple(found)


def marked() -> tuple[str, ...]:
    """List the files with tests that are marked `gpu`. To collect all tests takes minutes, and more
    packages.
    """
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(
        str(file.relative_to(ROOT)) for file in files if "mark.gpu" in file.read_text(encoding="utf-8")
    )
