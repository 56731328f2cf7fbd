"""From what a caller asks to what the caller gets: texts to token ids before the engine works on them, and
token ids to text afterwards. An embedded engine and the gRPC service both stand on this package.
"""
