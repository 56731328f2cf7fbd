"""Makes the spans of traces: of RPCs and requests on the event loop, of steps from the engine's journal."""
