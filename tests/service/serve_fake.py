"""`penstock serve` with the fake engine in place of the real one, as a process to send signals to.

--served-model-name chooses what it does: "never-loads" never finishes loading, "never-ready" never finishes
warming up, "dies" fails at its first request, "hangs" does not return from handing out its first step. With
"deaf" gRPC's server ends by itself once it is ready, with "deaf-early" while it loads.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Any

from penstock import runtime
from penstock.runtime.config import EngineConfig
from penstock.server_cli.commands import serve
from penstock.service.server import PenstockServer
from tests.service.fake import FakeEngine
from tests.support.models.byte_text import ByteText


class SlowEngine(FakeEngine):
    """Ten steps a second."""

    def __init__(self, *, dies: bool, hangs: bool, **options: Any) -> None:
        super().__init__(**options)
        self.hangs = hangs
        self.runner.before_step = fail if dies else lambda: time.sleep(0.1)

    def submit(self, request: Any, sink: Any, prepared: Any = None) -> None:
        def hang(_: object) -> None:
            threading.Event().wait()

        super().submit(request, hang if self.hangs else sink, prepared)


def fail() -> None:
    raise RuntimeError("the device is gone")


class Loader:
    """Stands in for the class `Engine`."""

    @staticmethod
    def from_pretrained(model: str, config: EngineConfig, *, lead: None = None) -> Any:
        forever = threading.Event()
        if config.served_model_name in ("never-loads", "deaf-early"):
            forever.wait()
        start: Any = forever.wait if config.served_model_name == "never-ready" else lambda: None
        return SlowEngine(
            dies=config.served_model_name == "dies",
            hangs=config.served_model_name == "hangs",
            codec=ByteText(),
            max_model_len=10_000,
            start=start,
            max_adapters=config.max_adapters,
            max_cached_adapters=config.max_cached_adapters,
            adapter_dir=config.adapter_dir,
        )


class DeafServer(PenstockServer):
    """A server of which one gRPC server ends by itself."""

    early = False

    async def start(self) -> None:
        await super().start()
        if self.early:
            await self.addresses.servers[0].stop(None)

    async def start_engine(self) -> None:
        await super().start_engine()
        await self.addresses.servers[0].stop(None)


if __name__ == "__main__":
    vars(runtime)["Engine"] = Loader
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["serve", "fake", *sys.argv[1:]])
    if (arguments.served_model_name or "").startswith("deaf"):
        DeafServer.early = arguments.served_model_name == "deaf-early"
        vars(serve)["PenstockServer"] = DeafServer
    sys.exit(serve.run(arguments))
