"""The engine's loop runs on any `Runner`: here on one of Python lists, in an interpreter without jax."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "flax"):
            raise ImportError(f"{name} is not to be had here")

sys.meta_path.insert(0, NoJax())

import threading
from penstock.runtime.loop.core import EngineCore
from penstock.runtime.loop.stepping import Pacer
from penstock.runtime.requests.request import (Request, StoppingParams)
from penstock.runtime.requests.sampling import (ResolvedSampling)
from penstock.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from tests.support.scheduler.fake_runner import EOS, VOCAB, LazyRunner, Rota, run_alone

config = SchedulerConfig(
    max_num_seqs=2, max_num_batched_tokens=8, max_model_len=60, page_size=4, num_pages=20,
    eos_token_ids=EOS, max_queued_requests=10,
)
core = EngineCore(LazyRunner(config), Scheduler(config), vocab_size=VOCAB, pacer=Pacer(10.0, 4))
core.start()
stopping = StoppingParams(max_tokens=12, ignore_eos=True)
requests = [
    Request("plain", (1, 2, 3), ResolvedSampling(temperature=0.0), stopping),
    Request("seeded", (4, 5), ResolvedSampling(seed=7), stopping),
    Request("constrained", (6,), ResolvedSampling(temperature=0.0), stopping, constraint=Rota(5)),
]
made, ended = {}, threading.Semaphore(0)

def sink(outputs):
    for output in outputs:
        made.setdefault(output.request_id, []).extend(output.token_ids)
        if output.last:
            ended.release()

for request in requests:
    core.submit(request, sink)
for _ in requests:
    assert ended.acquire(timeout=60)
core.check()
core.shutdown()
for request in requests:
    assert made[request.request_id] == run_alone(request, 60)[0], request.request_id
print(sum(map(len, made.values())))
"""


def test_the_loop_runs_without_jax() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["29"]
