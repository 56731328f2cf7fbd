"""What the endpoints that generate share: options of a request, the frame of an answer, and
log-probabilities."""
