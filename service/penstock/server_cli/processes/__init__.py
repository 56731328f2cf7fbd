"""Processes on this machine that commands start or signal."""
