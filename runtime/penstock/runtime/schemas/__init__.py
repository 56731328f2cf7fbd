"""JSON Schemas of callers, made ready for llguidance."""
