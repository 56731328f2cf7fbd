"""Writes the grammars that make a model answer with the tool calls that were asked for."""
