"""Puts load on a server: many streams at once, by our own client and by ghz (see README.md)."""
