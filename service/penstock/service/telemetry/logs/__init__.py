"""What the server writes into its log, and how the lines reach a file or stderr."""
