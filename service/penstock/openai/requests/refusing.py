"""Errors for fields that cannot be taken, in the words of OpenAI's API, by which clients tell them apart."""

from __future__ import annotations

from penstock.openai.failures import INVALID, ApiError


def invalid_value(param: str, why: str) -> ApiError:
    """No request can have this value."""
    return _refusal(param, f"Invalid value for '{param}': {why}", "invalid_value")


def invalid_type(param: str, why: str) -> ApiError:
    """The value is of a kind of JSON that the field does not have."""
    return _refusal(param, f"Invalid type for '{param}': {why}", "invalid_type")


def unsupported_value(param: str, why: str) -> ApiError:
    """Others may take this value, and this front or the served model does not."""
    return _refusal(param, f"Unsupported value: '{param}': {why}", "unsupported_value")


def unsupported_parameter(param: str, why: str) -> ApiError:
    """OpenAI or vLLM has the field, and this front or the served model does not honour it."""
    return _refusal(param, f"Unsupported parameter: '{param}': {why}", "unsupported_parameter")


def unknown(param: str) -> ApiError:
    """Nobody has the field."""
    return _refusal(param, f"Unknown parameter: '{param}'.", "unknown_parameter")


def missing(param: str) -> ApiError:
    """A field is required that was left out."""
    return _refusal(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def _refusal(param: str, message: str, code: str) -> ApiError:
    return ApiError(400, message, INVALID, param or None, code)
