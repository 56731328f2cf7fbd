"""Processes that speak gRPC with clients in place of the engine's process, which alone cannot serve many.

One Python process sends only so many messages a second, and most of what it takes for one is gRPC. With
`--front-processes` others do that: each is a gRPC server on the same port (SO_REUSEPORT), and carries calls
as bytes over its link, a socket pair. Everything else, such as keys, places, limits, errors and traces, stays
in the engine's process. One message of a call is under way in each direction, so a slow reader blocks
`context.write` there as always, and the rules about stalled peers hold. A front process that dies takes its
calls with it, and is replaced; where they die at once the server ends.
"""
