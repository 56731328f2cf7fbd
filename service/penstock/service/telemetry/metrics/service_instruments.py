"""The definitions of all metrics that the service has. Those of the engine are with the engine."""

from __future__ import annotations

from penstock.runtime.measuring.engine_instruments import DURATION_BUCKETS
from penstock.runtime.measuring.instruments import Instrument, Kind

CALL_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""In seconds: those that OpenTelemetry's conventions demand of calls."""
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

READY = Instrument(
    "penstock.ready",
    Kind.GAUGE,
    "{flag}",
    "1 while health says SERVING, else 0: also while the model loads.",
)
CALL_DURATION = Instrument(
    "rpc.server.call.duration",
    Kind.HISTOGRAM,
    "s",
    "From the arrival of a call's headers until its status was decided. Calls of unknown methods have the "
    "method _OTHER.",
    ("rpc.system.name", "rpc.method", "rpc.response.status_code"),
    CALL_BUCKETS,
)
REFUSED = Instrument(
    "penstock.requests.refused",
    Kind.COUNTER,
    "{call}",
    "Calls that ended with an error of the server's table of errors, by its reason.",
    ("reason",),
)
CALLS_ACTIVE = Instrument(
    "penstock.calls.active",
    Kind.GAUGE,
    "{call}",
    "Calls under way, by the kind whose bound they count against.",
    ("kind",),
)
LANE_WORK = Instrument(
    "penstock.lane.work",
    Kind.GAUGE,
    "{work}",
    "Work that runs or waits in a lane, in the lane's own unit: pieces, bytes or characters.",
    ("lane",),
)
LANE_CAPACITY = Instrument(
    "penstock.lane.capacity",
    Kind.GAUGE,
    "{work}",
    "Work beyond which a lane refuses more, in the same unit.",
    ("lane",),
)
LANE_REFUSED = Instrument(
    "penstock.lane.refused",
    Kind.COUNTER,
    "{work}",
    "Pieces of work that a lane refused, because it had too much.",
    ("lane",),
)
LANE_TIME = Instrument(
    "penstock.lane.time",
    Kind.HISTOGRAM,
    "s",
    "From when a piece of work was given to a lane until it was done. Small work is done without a lane.",
    ("lane",),
    DURATION_BUCKETS,
)
STREAMS_MERGED = Instrument(
    "penstock.streams.merged",
    Kind.COUNTER,
    "{delta}",
    "Deltas of streams that were merged with one that still waited, because the reader was slower than the "
    "engine, or asked for fewer messages.",
)
STREAMS_STALLED = Instrument(
    "penstock.streams.stalled",
    Kind.COUNTER,
    "{call}",
    "Calls that were ended because their client did not read.",
)
REPLIES_WAITING = Instrument(
    "penstock.replies.waiting", Kind.GAUGE, "By", "Bytes of replies that wait to be read, of all requests."
)
SPANS = Instrument(
    "penstock.spans",
    Kind.COUNTER,
    "{span}",
    "Spans of traces: exported, dropped because too many waited, or failed to be exported.",
    ("outcome",),
)
ADAPTERS = Instrument(
    "penstock.adapters",
    Kind.GAUGE,
    "{adapter}",
    "LoRA adapters in memory, by where their weights are: loading, cached on the host, or loaded on the "
    "device.",
    ("state",),
)
ADAPTER_REQUESTS = Instrument(
    "penstock.adapter.requests",
    Kind.COUNTER,
    "{request}",
    "Requests that the engine took, by the LoRA adapter that they named. An adapter that has left memory is "
    "not told any more.",
    ("adapter",),
)
ADAPTER_EVICTIONS = Instrument(
    "penstock.adapter.evictions",
    Kind.COUNTER,
    "{eviction}",
    "How often a LoRA adapter left the memory of the device, or that of the host, for another one. One that "
    "was unloaded or replaced before is not counted.",
    ("memory",),
)
LOOP_LAG = Instrument(
    "penstock.event_loop.lag",
    Kind.HISTOGRAM,
    "s",
    "How late a timer of the event loop that serves all calls fires. It is set four times a second.",
    (),
    LAG_BUCKETS,
)

SERVICE_INSTRUMENTS = (
    *(READY, CALL_DURATION, REFUSED, CALLS_ACTIVE),
    *(LANE_WORK, LANE_CAPACITY, LANE_REFUSED, LANE_TIME),
    *(STREAMS_MERGED, STREAMS_STALLED, REPLIES_WAITING, SPANS),
    *(ADAPTERS, ADAPTER_REQUESTS, ADAPTER_EVICTIONS, LOOP_LAG),
)
"""All instruments of the service."""
