"""The OpenAI front: a process that speaks OpenAI's HTTP API, and is a plain gRPC client of a server. It
imports neither the engine nor the service.
"""
