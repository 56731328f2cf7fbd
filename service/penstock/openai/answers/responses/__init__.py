"""Answers of /v1/responses, whole and as events."""
