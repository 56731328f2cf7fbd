"""The gRPC server around one engine: its RPCs, the conversion of messages, callers' keys, limits
and traces.
"""
