"""Calls that are written in Python."""
