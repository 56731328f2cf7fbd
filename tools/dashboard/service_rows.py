"""The rows on the service around the engine, and on the process."""

from __future__ import annotations

from tools.dashboard.panels import Form, Panel, Query, Row, mean, percentiles, rate

SERVICE = Row(
    "Service",
    (
        Panel(
            "Lag of the event loop",
            "How late a timer fires on the event loop that serves all calls. Above 0.1 s, all "
            "streams suffer.",
            percentiles("penstock_event_loop_lag_seconds", 0.5, 0.99),
            "s",
        ),
        Panel(
            "Lanes: work against capacity",
            "How full each lane is: what runs or waits in it, against what it takes before it refuses.",
            [
                Query(
                    "max by (lane) (penstock_lane_work{@} / penstock_lane_capacity{@})",
                    "{{lane}}",
                )
            ],
            "percentunit",
        ),
        Panel(
            "Lanes: refusals",
            "Pieces of work per second that a lane refused because it had too much.",
            [rate("penstock_lane_refused_total", "{{lane}}", "lane")],
            "ops",
        ),
        Panel(
            "Lanes: time of a piece",
            "The 99th percentile, from when a piece of work was given to the lane until it was done.",
            percentiles("penstock_lane_time_seconds", 0.99, labels="lane"),
            "s",
        ),
        Panel(
            "Streams merged and stalled",
            "Deltas per second that were merged because their reader was slower than the engine, "
            "and streams that "
            "were given up because nobody read them.",
            [
                rate("penstock_streams_merged_total", "deltas merged"),
                rate("penstock_streams_stalled_total", "streams stalled"),
            ],
            "ops",
        ),
        Panel(
            "Replies that wait",
            "Bytes of replies that clients have not read yet.",
            [Query("sum by (instance) (penstock_replies_waiting_bytes{@})", "{{instance}}")],
            "bytes",
        ),
        Panel(
            "Spans",
            "Spans per second, by what came of them. Dropped and failed ones are gaps in traces.",
            [rate("penstock_spans_total", "{{outcome}}", "outcome")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Outputs that failed",
            "Outputs per second that ended with an error, by its class.",
            [
                Query(
                    "sum by (error_type) (rate(penstock_outputs_failed_total{@}[~])) or vector(0)",
                    "{{error_type}}",
                )
            ],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Mean time of calls",
            "Over all methods.",
            [mean("rpc_server_call_duration_seconds", "mean")],
            "s",
        ),
    ),
)

PROCESS = Row(
    "Process",
    (
        Panel(
            "Processors",
            "How many processors each process keeps busy.",
            [Query('rate(process_cpu_seconds_total{@, job="penstock"}[~])', "{{instance}}")],
        ),
        Panel(
            "Resident memory",
            "Memory of each process.",
            [Query('process_resident_memory_bytes{@, job="penstock"}', "{{instance}}")],
            "bytes",
        ),
        Panel(
            "Open files",
            "File descriptors, of which each connection takes one, as a share of those that are allowed.",
            [
                Query(
                    'process_open_fds{@, job="penstock"} / process_max_fds{@, job="penstock"}',
                    "{{instance}}",
                )
            ],
            "percentunit",
        ),
    ),
)
