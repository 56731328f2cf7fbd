"""Processes that speak gRPC with clients in place of the engine's process, which alone cannot serve many."""
