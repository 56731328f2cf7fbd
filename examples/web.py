"""A web server with a model in its process.

    python examples/web.py --port 8000
    curl -N localhost:8000/generate -d '{"prompt": "Once upon a time", "max_tokens": 40}'

POST /generate answers with server-sent events: one for each piece of text, then one with the reason of the
end. A client that goes away ends its request. GET /load says how many requests run and wait. This is the
standard library's server, which has a thread for each connection; it is an example, and no front for the open
internet.
"""

from __future__ import annotations

import argparse
import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from penstock.runtime import Engine, EngineConfig, GenerationStream, SamplingParams, StoppingParams
from penstock.runtime.errors import RequestError, UnavailableError

MOST_BYTES = 1024 * 1024
"""Of the body of a request."""


class Handler(BaseHTTPRequestHandler):
    """One connection. `serve` gives it its engine."""

    engine: Engine

    def do_GET(self) -> None:
        """How busy the engine is."""
        if self.path != "/load":
            self.answer(HTTPStatus.NOT_FOUND, {"error": "there is POST /generate and GET /load"})
            return
        load = self.engine.load()
        self.answer(HTTPStatus.OK, {"running": load.num_running, "waiting": load.num_waiting})

    def do_POST(self) -> None:
        """Generate; everything that is wrong is said before the first event."""
        if self.path != "/generate":
            self.answer(HTTPStatus.NOT_FOUND, {"error": "there is POST /generate and GET /load"})
            return
        try:
            stream = self.start(self.body())
        except (RequestError, TypeError, ValueError) as error:
            self.answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except UnavailableError as error:
            self.answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": str(error)})
        else:
            with stream:
                self.send_events(stream)

    def body(self) -> dict[str, Any]:
        """Return the JSON object in the request's body. ValueError where there is none."""
        length = int(self.headers.get("Content-Length", 0))
        if not 0 < length <= MOST_BYTES:
            raise ValueError(f"the body must have 1 to {MOST_BYTES} bytes")
        fields = json.loads(self.rfile.read(length))
        if not isinstance(fields, dict) or "prompt" not in fields:
            raise ValueError('the body must be a JSON object with "prompt"')
        return fields

    def start(self, fields: dict[str, Any]) -> GenerationStream:
        """Start the request."""
        prompt = fields.pop("prompt")
        stopping = StoppingParams(max_tokens=fields.pop("max_tokens", 100))
        return self.engine.stream(prompt, stopping=stopping, sampling=SamplingParams(**fields))

    def send_events(self, stream: GenerationStream) -> None:
        """Send what the engine makes, as it comes. A client that goes away ends the stream."""
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for delta in stream:
                if delta.delta:
                    self.send_event({"text": delta.delta})
                if delta.finish is not None:
                    self.send_event({"finish": delta.finish.reason.value})
        except OSError:
            self.log_message("the client went away")

    def send_event(self, fields: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(fields)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: HTTPStatus, fields: dict[str, Any]) -> None:
        """Send a whole answer."""
        content = json.dumps(fields).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def server_of(engine: Engine, port: int) -> ThreadingHTTPServer:
    """Make a server for the engine on 127.0.0.1; port 0: the system chooses one."""
    return ThreadingHTTPServer(("127.0.0.1", port), type("EngineHandler", (Handler,), {"engine": engine}))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a model over HTTP.")
    parser.add_argument("--model", default="demo", help="demo, a folder, or a Hugging Face id")
    parser.add_argument("--port", type=int, default=8000, help="0: one that is free")
    options = parser.parse_args()
    with (
        Engine.from_pretrained(options.model, EngineConfig(max_num_seqs=4)) as engine,
        server_of(engine, options.port) as server,
    ):
        print(f"serving on http://127.0.0.1:{server.server_address[1]}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopping")


if __name__ == "__main__":
    main()
