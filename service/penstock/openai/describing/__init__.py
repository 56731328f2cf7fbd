"""Describes the front to programs: `/openapi.json`."""
