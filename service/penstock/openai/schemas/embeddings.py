"""The body of a request to /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from penstock.openai.schemas.base import RequestBody
from penstock.openai.schemas.completions import Prompt, prompts_in

MAX_INPUTS: Final = 2048
"""The most inputs of one request, as in OpenAI's API."""


class EmbeddingBody(RequestBody):
    """Texts, or token ids, each of which becomes a vector."""

    model: str
    input: Annotated[Any, BeforeValidator(prompts_in("input", MAX_INPUTS), json_schema_input_type=Prompt)]
    """A `Prompt`, whose shape has been checked."""
    dimensions: int | None = Field(default=None, ge=1)
    """How many numbers of each vector are kept, from its start; without it all."""
    encoding_format: Literal["float", "base64"] | None = None
    """How a vector is written: as a list of numbers, which is the default, or as the base64 of its floats of
    32 bits.
    """
