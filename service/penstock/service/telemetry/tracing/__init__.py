"""Makes the spans of traces: of RPCs and requests on the event loop, of steps from the engine's journal.

On the event loop a request leaves only the span of its RPC, which OpenTelemetry's SDK samples, and notes in
the journal. All other spans are made on the journal's thread, directly in OTLP's wire form. A step has a
trace of its own, because it computes many requests at once; it is recorded only if one of them is. Spans and
events of a request are bounded, and what is left out is counted.
"""
