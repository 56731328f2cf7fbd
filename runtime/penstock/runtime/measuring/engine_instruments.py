"""The definitions of all metrics that an engine has. Those of the service are with the service.

Prometheus' names are made of these: dots become underscores, and the unit and "_total" are appended.
"""

from __future__ import annotations

from penstock.runtime.measuring.instruments import Instrument, Kind

TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)  # fmt: skip
"""In seconds: those that OpenTelemetry's GenAI conventions demand, as they do for the next two."""
TIME_PER_OUTPUT_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS = tuple(float(2**i) for i in range(21))
"""1 to 1,048,576 tokens."""
ROW_BUCKETS = tuple(float(2**i) for i in range(11))
"""1 to 1,024 rows."""

_GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


def _counter(name: str, unit: str, description: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.COUNTER, unit, description, labels)


def _gauge(name: str, unit: str, description: str, *labels: str) -> Instrument:
    return Instrument(name, Kind.GAUGE, unit, description, labels)


def _histogram(
    name: str, unit: str, description: str, buckets: tuple[float, ...], *labels: str
) -> Instrument:
    return Instrument(name, Kind.HISTOGRAM, unit, description, labels, buckets)


# -- how busy the engine is --

OUTPUTS_RUNNING = _gauge("penstock.outputs.running", "{output}", "Outputs that run. A request of n has n.")
OUTPUTS_WAITING = _gauge("penstock.outputs.waiting", "{output}", "Outputs that wait. A request of n has n.")
WAITING_PROMPT_TOKENS = _gauge(
    "penstock.waiting.prompt_tokens", "{token}", "Tokens of the prompts of outputs that wait."
)
KV_PAGES = _gauge(
    "penstock.kv.pages",
    "{page}",
    "Pages of the KV cache: used by running outputs, cached for prefixes only, or free.",
    "state",
)
KV_USAGE = _gauge("penstock.kv.usage", "1", "Share of the KV cache's pages that running outputs use.")
PAUSED = _gauge("penstock.paused", "{flag}", "1 while the engine is paused, else 0.")

# -- outputs --

OUTPUTS_FINISHED = _counter(
    "penstock.outputs.finished",
    "{output}",
    "Outputs that ended, by the engine's reason: also cancelled, which nobody read any more, and error. "
    "Where the engine ended an output before it heard of a stop string, the client is told stop instead. "
    "A request of n counts n times.",
    "reason",
)
OUTPUTS_FAILED = _counter(
    "penstock.outputs.failed", "{output}", "Outputs that ended with an error, by its class.", "error.type"
)
TOKENS_PROMPT = _counter(
    "penstock.tokens.prompt", "{token}", "Prompt tokens of outputs that got as far as their first token."
)
TOKENS_GENERATED = _counter("penstock.tokens.generated", "{token}", "Tokens that outputs got.")
TOKENS_CACHED = _counter(
    "penstock.tokens.cached",
    "{token}",
    "Prompt tokens of ended outputs that were not computed, because their KV was in the cache.",
)
TOKENS_RECOMPUTED = _counter(
    "penstock.tokens.recomputed", "{token}", "Tokens that were computed again after a preemption."
)
PREFIX_CACHE_QUERIED = _counter(
    "penstock.prefix_cache.queried", "{token}", "Tokens that outputs looked for in the prefix cache."
)
PREFIX_CACHE_HIT = _counter(
    "penstock.prefix_cache.hit", "{token}", "Tokens that outputs found in the prefix cache."
)
PREEMPTIONS = _counter("penstock.preemptions", "{preemption}", "Times that a running output lost its pages.")
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From the arrival of its request until an output has its first token.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
    *_GEN_AI,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between the tokens of an output that ended well and has at least two.",
    TIME_PER_OUTPUT_TOKEN_BUCKETS,
    *_GEN_AI,
)
REQUEST_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "From the arrival of its request until an output has ended, in whatever way.",
    DURATION_BUCKETS,
    *_GEN_AI,
    "error.type",
)
INTER_TOKEN_LATENCY = _histogram(
    "penstock.output.inter_token_latency",
    "s",
    "Time between two tokens of an output. Tokens that a window made have equal shares of its time.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
QUEUE_TIME = _histogram(
    "penstock.output.queue_time",
    "s",
    "Time that an output waited until it ran for the first time, or ended before that.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
PREFILL_TIME = _histogram(
    "penstock.output.prefill_time",
    "s",
    "From when an output ran for the first time until it had its first token.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
DECODE_TIME = _histogram(
    "penstock.output.decode_time",
    "s",
    "From when an output had its first token until it ended.",
    DURATION_BUCKETS,
)
RUNNING_TIME = _histogram(
    "penstock.output.running_time",
    "s",
    "From when an output ran for the first time until it ended.",
    DURATION_BUCKETS,
)
PROMPT_TOKENS = _histogram(
    "penstock.output.prompt_tokens", "{token}", "Prompt tokens of an output that ended.", TOKEN_BUCKETS
)
GENERATED_TOKENS = _histogram(
    "penstock.output.generated_tokens", "{token}", "Tokens of an output that ended.", TOKEN_BUCKETS
)

# -- steps --

STEPS = _counter(
    "penstock.steps",
    "{step}",
    "Steps, by their kind: prefill, decode, mixed, or window, which is several decode steps at once.",
    "kind",
)
STEP_TOKENS_COMPUTED = _counter(
    "penstock.step.tokens.computed", "{token}", "Tokens of outputs that steps computed."
)
STEP_TOKENS_PADDING = _counter(
    "penstock.step.tokens.padding",
    "{token}",
    "Places for tokens in the compiled programs of steps that held no token of an output.",
)
STEP_TIME = _counter(
    "penstock.step.time",
    "s",
    "Time of the engine's thread, by its part in steps: schedule, pack, dispatch, wait for the device, emit.",
    "part",
)
STEP_DURATION = _histogram(
    "penstock.step.duration",
    "s",
    "Time of the device for one step: from its dispatch, or the end of the step before, until its tokens are "
    "on the host.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
    "kind",
)
STEP_ROWS = _histogram("penstock.step.rows", "{row}", "Rows of a step.", ROW_BUCKETS)
SPECULATION_PROPOSED = _counter(
    "penstock.speculation.proposed",
    "{token}",
    "Tokens that were proposed for outputs and checked by the model, by their proposer and by their position "
    "in the proposal, from 1.",
    *("proposer", "position"),
)
SPECULATION_ACCEPTED = _counter(
    "penstock.speculation.accepted",
    "{token}",
    "Proposed tokens that became tokens of their outputs, by the same labels.",
    *("proposer", "position"),
)
GRAMMAR_PUT_OFF_ROWS = _counter(
    "penstock.grammar.put_off_rows",
    "{row}",
    "Rows that got their token in a later step, because a mask was not ready.",
)
COMPILES_AFTER_WARMUP = _counter(
    "penstock.compiles.after_warmup",
    "{compile}",
    "Programs that were compiled while serving, which should never happen.",
)

# -- weights, memory, and what runs here --

WEIGHTS_GENERATION = _gauge(
    "penstock.weights.generation",
    "{generation}",
    "The number of the weights that serve: 1 at the start, and one more with each update.",
)
WEIGHTS_BROKEN = _gauge(
    "penstock.weights.broken",
    "{flag}",
    "1 while the weights cannot serve, because an update in place has failed halfway, else 0.",
)
WEIGHTS_UPDATES = _counter(
    "penstock.weights.updates",
    "{update}",
    "Weight updates that were begun and have ended: applied, discarded after they were staged, or failed, "
    "which also counts those taken back.",
    "outcome",
)
WEIGHTS_BYTES = _counter("penstock.weights.bytes", "By", "Bytes of tensors that came for weight updates.")
WEIGHTS_STAGING_TIME = _histogram(
    "penstock.weights.staging_time",
    "s",
    "From the beginning of a weight update until all of it was checked and could go live.",
    DURATION_BUCKETS,
)
WEIGHTS_PAUSE_TIME = _histogram(
    "penstock.weights.pause_time",
    "s",
    "For how long a weight update let no token be made.",
    TIME_TO_FIRST_TOKEN_BUCKETS,
)
MEMORY = _gauge(
    "penstock.memory",
    "By",
    "Memory: of the weights, of the KV cache, of the process (resident), and all that JAX uses of the "
    "device, where the device reports that. Of a model that is cut over several devices: of one of them.",
    "kind",
)
BUILD_INFO = _gauge(
    "penstock.build.info",
    "{build}",
    "Always 1; the labels say what runs here.",
    *("version", "jax", "platform", "model", "dtype", "quantization", "kv_cache_dtype"),
)
JOURNAL_DROPPED = _counter(
    "penstock.journal.dropped",
    "{entry}",
    "Entries of the engine's journal that were dropped because its readers were too slow. Metrics and traces "
    "lack what they told.",
)

ENGINE_INSTRUMENTS = (
    *(OUTPUTS_RUNNING, OUTPUTS_WAITING, WAITING_PROMPT_TOKENS, KV_PAGES, KV_USAGE, PAUSED),
    *(OUTPUTS_FINISHED, OUTPUTS_FAILED),
    *(TOKENS_PROMPT, TOKENS_GENERATED, TOKENS_CACHED, TOKENS_RECOMPUTED),
    *(PREFIX_CACHE_QUERIED, PREFIX_CACHE_HIT, PREEMPTIONS),
    *(TIME_TO_FIRST_TOKEN, TIME_PER_OUTPUT_TOKEN, REQUEST_DURATION, INTER_TOKEN_LATENCY),
    *(QUEUE_TIME, PREFILL_TIME, DECODE_TIME, RUNNING_TIME, PROMPT_TOKENS, GENERATED_TOKENS),
    *(STEPS, STEP_TOKENS_COMPUTED, STEP_TOKENS_PADDING, STEP_TIME, STEP_DURATION, STEP_ROWS),
    *(SPECULATION_PROPOSED, SPECULATION_ACCEPTED),
    *(GRAMMAR_PUT_OFF_ROWS, COMPILES_AFTER_WARMUP),
    *(WEIGHTS_GENERATION, WEIGHTS_BROKEN, WEIGHTS_UPDATES, WEIGHTS_BYTES),
    *(WEIGHTS_STAGING_TIME, WEIGHTS_PAUSE_TIME),
    *(MEMORY, BUILD_INFO, JOURNAL_DROPPED),
)
"""All instruments of an engine."""
