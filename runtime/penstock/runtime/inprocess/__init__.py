"""What a program calls that has an engine in its own process: options, streams, lists of prompts, and
asyncio.
"""
