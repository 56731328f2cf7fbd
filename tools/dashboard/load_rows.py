"""The rows on what servers are asked, and how long it takes them."""

from __future__ import annotations

from tools.dashboard.panels import Form, Panel, Query, Row, mean, percentiles, rate

TTFT = "gen_ai_server_time_to_first_token_seconds"
TPOT = "gen_ai_server_time_per_output_token_seconds"
DURATION = "gen_ai_server_request_duration_seconds"
ITL = "penstock_output_inter_token_latency_seconds"
CALLS = "rpc_server_call_duration_seconds"


def _number(title: str, about: str, query: Query, unit: str = "short", **more: float) -> Panel:
    return Panel(title, about, [query], unit, Form.NUMBER, width=3, height=4, **more)  # type: ignore[arg-type]


OVERVIEW = Row(
    "Overview",
    (
        _number(
            "Ready",
            "The share of the servers that take requests.",
            Query("sum(penstock_ready{@}) / count(penstock_ready{@})"),
            "percentunit",
            bad_below=1,
        ),
        _number(
            "Alerts",
            "How many alerts of Penstock fire. Prometheus' page /alerts shows which.",
            Query('count(ALERTS{alertname=~"Penstock.*", alertstate="firing"}) or vector(0)'),
            warn_above=1,
        ),
        _number("Running", "Outputs that run now.", Query("sum(penstock_outputs_running{@})")),
        _number("Waiting", "Outputs that wait now.", Query("sum(penstock_outputs_waiting{@})")),
        _number(
            "Generated",
            "Tokens that outputs got per second.",
            rate("penstock_tokens_generated_total", "tokens/s"),
            "suffix: tok/s",
        ),
        _number(
            "First token, p99",
            "99 of 100 outputs have their first token after this time.",
            percentiles(TTFT, 0.99)[0],
            "s",
        ),
        _number(
            "Between tokens, p99",
            "99 of 100 tokens come within this time of the one before.",
            percentiles(ITL, 0.99)[0],
            "s",
        ),
        Panel(
            "KV cache",
            "The share of the pages that running outputs use, on the fullest server.",
            [Query("max(penstock_kv_usage_ratio{@})")],
            "percentunit",
            Form.GAUGE,
            width=3,
            height=4,
            most=1,
            warn_above=0.9,
        ),
        Panel(
            "Servers",
            "What runs where.",
            [Query("penstock_build_info{@}")],
            form=Form.TABLE,
            width=24,
            height=5,
            columns={
                "instance": "Server",
                "model": "Model",
                "version": "Version",
                "platform": "Platform",
                "dtype": "Dtype",
                "quantization": "Quantization",
                "kv_cache_dtype": "KV cache",
                "jax": "JAX",
            },
        ),
    ),
)

TRAFFIC = Row(
    "Traffic",
    (
        Panel(
            "Tokens per second",
            "Prompt tokens, those of them whose KV was in the cache and so were not computed, and generated "
            "tokens.",
            [
                rate("penstock_tokens_generated_total", "generated"),
                rate("penstock_tokens_prompt_total", "prompt"),
                rate("penstock_tokens_cached_total", "prompt, cached"),
            ],
            "suffix: tok/s",
        ),
        Panel(
            "Outputs that ended, by reason",
            "`cancelled` means that nobody read any more; `error` is a fault of the server or of the model.",
            [rate("penstock_outputs_finished_total", "{{reason}}", "reason")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Outputs running and waiting",
            "Outputs wait when rows or pages are taken. A few may wait at times; a queue that "
            "only grows means "
            "too much load.",
            [
                Query("sum(penstock_outputs_running{@})", "running"),
                Query("sum(penstock_outputs_waiting{@})", "waiting"),
            ],
        ),
        Panel(
            "Calls by status",
            "Calls per second, by their gRPC status. INTERNAL is a fault of the server.",
            [rate(f"{CALLS}_count", "{{rpc_response_status_code}}", "rpc_response_status_code")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Refusals by reason",
            "Errors that the server answered, by the reasons of docs/reference/errors.md. "
            "QUEUE_FULL and BUSY mean "
            "too much load.",
            [rate("penstock_requests_refused_total", "{{reason}}", "reason")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Calls under way",
            "By the kind whose bound they count against.",
            [Query("sum by (kind) (penstock_calls_active{@})", "{{kind}}")],
        ),
        Panel(
            "Adapters",
            "LoRA adapters in memory, by where their weights are.",
            [Query("sum by (state) (penstock_adapters{@})", "{{state}}")],
        ),
        Panel(
            "Requests by adapter",
            "Requests of the LoRA adapters that are in memory.",
            [rate("penstock_adapter_requests_total", "{{adapter}}", "adapter")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Adapters that left memory",
            "How often a LoRA adapter left the device, or host memory, for another one.",
            [rate("penstock_adapter_evictions_total", "{{memory}}", "memory")],
            "ops",
        ),
        Panel(
            "Prompt tokens of an output",
            "How long prompts are.",
            percentiles("penstock_output_prompt_tokens", 0.5, 0.99),
        ),
        Panel(
            "Generated tokens of an output",
            "How long outputs are.",
            percentiles("penstock_output_generated_tokens", 0.5, 0.99),
        ),
        Panel(
            "Prompt tokens that wait",
            "Tokens of the prompts of outputs that wait: how much work stands in the queue.",
            [Query("sum by (instance) (penstock_waiting_prompt_tokens{@})", "{{instance}}")],
        ),
    ),
)

LATENCY = Row(
    "Latency",
    (
        Panel(
            "Time to first token",
            "From the arrival of a request until an output has its first token. Points are "
            "requests; each leads "
            "to its trace.",
            percentiles(TTFT, 0.5, 0.9, 0.99, exemplars=True),
            "s",
        ),
        Panel(
            "Time between tokens",
            "How long each token came after the one before.",
            percentiles(ITL, 0.5, 0.9, 0.99),
            "s",
        ),
        Panel(
            "Whole outputs",
            "From the arrival of a request until an output has ended. Long outputs take long: see "
            "the mean time "
            "per token beside it.",
            percentiles(DURATION, 0.5, 0.9, 0.99, exemplars=True),
            "s",
        ),
        Panel(
            "Where the time goes",
            "Mean time of an output in the queue, computing its prompt, and computing its tokens.",
            [
                mean("penstock_output_queue_time_seconds", "queue"),
                mean("penstock_output_prefill_time_seconds", "prefill"),
                mean("penstock_output_decode_time_seconds", "decode"),
            ],
            "s",
            Form.STACK,
        ),
        Panel(
            "Mean time per token of an output",
            "Percentiles over outputs, of the mean time between the tokens of each.",
            percentiles(TPOT, 0.5, 0.9, 0.99),
            "s",
        ),
        Panel(
            "Calls, p99 by method",
            "From the arrival of a call until its status.",
            percentiles(CALLS, 0.99, labels="rpc_method"),
            "s",
        ),
        Panel(
            "Time to first token, all outputs",
            "How many outputs had their first token after which time.",
            [Query(f"sum by (le) (increase({TTFT}_bucket{{@}}[~]))", "{{le}}")],
            "s",
            Form.HEATMAP,
            width=12,
        ),
        Panel(
            "Time between tokens, all tokens",
            "How many tokens came how long after the one before.",
            [Query(f"sum by (le) (increase({ITL}_bucket{{@}}[~]))", "{{le}}")],
            "s",
            Form.HEATMAP,
            width=12,
        ),
    ),
)
