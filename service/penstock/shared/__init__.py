"""What the server and its OpenAI front share, which know nothing of each other: the log, addresses of peers,
and protobuf's integers.
"""
