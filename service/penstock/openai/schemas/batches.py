"""The bodies of requests about batches."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from penstock.openai.schemas.base import Body

LEAST_KEPT_S: Final = 3600
MOST_KEPT_S: Final = 30 * 24 * 3600
"""How long a caller may ask a file to be kept, in seconds, as in OpenAI's API."""


class ExpiresAfter(Body):
    """How long files are kept."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)


class BatchBody(Body):
    """A batch that shall run."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(min_length=1, max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=16),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None
