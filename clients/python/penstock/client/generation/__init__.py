"""Generate and Stream: their options, requests, answers and running streams."""
