"""Measures OpenVINO GenAI's ContinuousBatchingPipeline with the prefix cache on, stepped from here.

The checkpoint is exported once with optimum-intel, beside itself, in 16 bits. On processors with bf16
instructions OpenVINO computes in bf16, and by default keeps keys and values in 8 bits; to change that: `--set
'properties={"KV_CACHE_PRECISION": "bf16"}'`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from bench.rivals.stepped import run
from bench.workloads import Job

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "cache_size": 3,
    "enable_prefix_caching": True,
    "dynamic_split_fuse": True,
    "properties": {},
    "weights": "fp16",
}
"""`properties` are OpenVINO's own, `weights` is optimum-cli's --weight-format, and `cache_size` is in GiB.
The others are fields of SchedulerConfig.
"""


def exported(checkpoint: Path, weights: str) -> Path:
    """Return the checkpoint in OpenVINO's format. It is made if absent, which takes minutes and several GB of
    memory.
    """
    folder = checkpoint.resolve().with_name(f"{checkpoint.resolve().name}-openvino-{weights}")
    if not (folder / "openvino_model.bin").exists():
        program = str(Path(sys.executable).with_name("optimum-cli"))
        wanted = ["--task", "text-generation-with-past", "--weight-format", weights]
        command = [program, "export", "openvino", "--model", str(checkpoint), *wanted, str(folder)]
        subprocess.run(command, check=True)
    return folder


class OpenVINO:
    def __init__(self, checkpoint: str, options: Mapping[str, Any]) -> None:
        config = genai.SchedulerConfig()
        for name in set(options) - {"properties", "weights"}:
            setattr(config, name, options[name])
        folder = exported(Path(checkpoint), options["weights"])
        self._pipeline = genai.ContinuousBatchingPipeline(str(folder), config, "CPU", options["properties"])
        self._running: dict[int, Any] = {}

    def add(self, number: int, job: Job) -> None:
        params = genai.GenerationConfig(max_new_tokens=job.max_tokens, ignore_eos=True, do_sample=False)
        tokens = ov.Tensor(np.array([job.token_ids], np.int64))
        self._running[number] = self._pipeline.add_request(number, tokens, params)

    def step(self) -> dict[int, int]:
        self._pipeline.step()
        made: dict[int, int] = {}
        for number, handle in list(self._running.items()):
            if handle.can_read():
                made[number] = sum(len(output.generated_ids) for output in handle.read().values())
            if handle.get_status() != genai.GenerationStatus.RUNNING:
                del self._running[number]
        return made


if __name__ == "__main__":
    packages = ("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers")
    sys.exit(run("openvino", packages, OPTIONS, OpenVINO))
