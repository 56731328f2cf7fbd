"""What the server writes into its log, and how the lines reach a file or stderr.

A call has at most one line: that of its refusal, or that of the access log.
"""
