"""The rows on the engine: its steps, its KV cache and its weights."""

from __future__ import annotations

from tools.dashboard.panels import Form, Panel, Query, Row, mean, percentiles, rate

BATCH = Row(
    "Steps of the engine",
    (
        Panel(
            "Steps per second",
            "By kind. A window is several decode steps in one dispatch; `mixed` steps compute "
            "prompts and decode.",
            [rate("penstock_steps_total", "{{kind}}", "kind")],
            "ops",
            Form.STACK,
        ),
        Panel(
            "Rows of a step",
            "The mean, and the 99th percentile. More rows make more tokens per second, and each "
            "token slower.",
            [mean("penstock_step_rows", "mean"), *percentiles("penstock_step_rows", 0.99)],
        ),
        Panel(
            "Duration of a step",
            "Time of the device for one step, by kind.",
            percentiles("penstock_step_duration_seconds", 0.5, 0.99, labels="kind"),
            "s",
        ),
        Panel(
            "Time of the engine's thread",
            "Seconds per second that each part of the steps takes. `wait` is the time in which "
            "the device computes "
            "and the host has nothing left to do; the other parts are the host's.",
            [rate("penstock_step_time_seconds_total", "{{part}}", "part")],
            "percentunit",
            Form.STACK,
        ),
        Panel(
            "Host's share of a step",
            "The share of the engine's time that is not waiting for the device.",
            [
                Query(
                    'sum(rate(penstock_step_time_seconds_total{@, part!="wait"}[~]))'
                    " / sum(rate(penstock_step_time_seconds_total{@}[~]))",
                    "host",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Padding",
            "The share of the places in compiled programs that held no token of an output.",
            [
                Query(
                    "sum(rate(penstock_step_tokens_padding_total{@}[~]))"
                    " / (sum(rate(penstock_step_tokens_padding_total{@}[~]))"
                    " + sum(rate(penstock_step_tokens_computed_total{@}[~])))",
                    "padding",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Proposed tokens",
            "Tokens per second that were proposed and checked by the model, and how many of these were "
            "accepted. Without speculation there are none.",
            [
                rate("penstock_speculation_proposed_total", "proposed by {{proposer}}", "proposer"),
                rate("penstock_speculation_accepted_total", "accepted of {{proposer}}", "proposer"),
            ],
            "suffix: tok/s",
        ),
        Panel(
            "Accepted share by position",
            "The share of the proposed tokens that were accepted, by their position in the proposal.",
            [
                Query(
                    "sum by (position) (rate(penstock_speculation_accepted_total{@}[~]))"
                    " / sum by (position) (rate(penstock_speculation_proposed_total{@}[~]))",
                    "{{position}}",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Rows put off for a mask",
            "Rows under a grammar that got their token a step later, because their mask was not ready.",
            [rate("penstock_grammar_put_off_rows_total", "rows")],
            "ops",
        ),
        Panel(
            "Programs compiled while serving",
            "This should always be 0: all programs are compiled before the first request.",
            [Query("sum(increase(penstock_compiles_after_warmup_total{@}[~]))", "programs")],
        ),
        Panel(
            "Entries of the journal dropped",
            "This should always be 0. Otherwise metrics and traces lack what the dropped entries told.",
            [Query("sum(increase(penstock_journal_dropped_total{@}[~]))", "entries")],
        ),
    ),
)

CACHE = Row(
    "KV cache and memory",
    (
        Panel(
            "Pages",
            "`used` by running outputs, `cached` for prefixes only (taken when they are needed), and `free`.",
            [Query("sum by (state) (penstock_kv_pages{@})", "{{state}}")],
            form=Form.STACK,
        ),
        Panel(
            "Usage by server",
            "The share of the pages that running outputs use. At 1, outputs are preempted.",
            [Query("max by (instance) (penstock_kv_usage_ratio{@})", "{{instance}}")],
            "percentunit",
            most=1,
        ),
        Panel(
            "Prefix cache hit rate",
            "The share of the tokens looked for in the prefix cache that were there.",
            [
                Query(
                    "sum(rate(penstock_prefix_cache_hit_total{@}[~]))"
                    " / sum(rate(penstock_prefix_cache_queried_total{@}[~]))",
                    "hit",
                )
            ],
            "percentunit",
            most=1,
        ),
        Panel(
            "Preemptions",
            "How often a running output lost its pages, per second.",
            [rate("penstock_preemptions_total", "preemptions")],
            "ops",
        ),
        Panel(
            "Tokens computed again",
            "Tokens per second that were computed a second time after a preemption: wasted work.",
            [rate("penstock_tokens_recomputed_total", "tokens")],
            "suffix: tok/s",
        ),
        Panel(
            "Memory",
            "Of the weights, of the KV cache, of the whole process (`resident`), and of the device.",
            [Query("sum by (kind) (penstock_memory_bytes{@})", "{{kind}}")],
            "bytes",
        ),
    ),
)

WEIGHTS = Row(
    "Weights",
    (
        Panel(
            "Generation",
            "Which weights each server has: 1 at the start, and one more with each update.",
            [Query("max by (instance) (penstock_weights_generation{@})", "{{instance}}")],
        ),
        Panel(
            "Updates",
            "Updates that ended, by what came of them.",
            [Query("sum by (outcome) (increase(penstock_weights_updates_total{@}[~]))", "{{outcome}}")],
            form=Form.STACK,
        ),
        Panel(
            "Time of updates",
            "How long an update took until it was whole and checked, and for how long it let no "
            "token be made.",
            [
                mean("penstock_weights_staging_time_seconds", "staging"),
                mean("penstock_weights_pause_time_seconds", "pause"),
            ],
            "s",
        ),
        Panel(
            "Bytes of updates",
            "Bytes of tensors that came per second.",
            [rate("penstock_weights_bytes_total", "bytes")],
            "Bps",
        ),
        Panel(
            "Paused, or without whole weights",
            "1 while a server is paused, or while an update in place that failed halfway leaves "
            "it without whole "
            "weights.",
            [
                Query("max by (instance) (penstock_paused{@})", "paused {{instance}}"),
                Query("max by (instance) (penstock_weights_broken{@})", "broken {{instance}}"),
            ],
            most=1,
        ),
    ),
)
