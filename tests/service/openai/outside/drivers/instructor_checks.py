"""What Instructor does with the OpenAI front. `run_checks.py` runs the checks."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class Sum(BaseModel):
    sum: Literal["six", "seven"]  # the demo model may never end a string


def fills(endpoint, mode):
    client = openai.OpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
    made = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=endpoint.model,
        messages=[{"role": "user", "content": "what is 3 + 4?"}],
        response_model=Sum,
        max_retries=0,
    )
    assert isinstance(made, Sum), made


def check_tools(endpoint):
    fills(endpoint, instructor.Mode.TOOLS)


def check_tools_strict(endpoint):
    fills(endpoint, instructor.Mode.TOOLS_STRICT)


def check_responses_tools(endpoint):
    fills(endpoint, instructor.Mode.RESPONSES_TOOLS)
