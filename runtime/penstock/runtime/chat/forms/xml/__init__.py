"""Calls that are written in XML, with one element for each argument."""
