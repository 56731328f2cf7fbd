"""The forms in which models write tool calls: one parser for each, and the scanners they share."""
