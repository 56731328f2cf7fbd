"""What Schemathesis changes in what it makes up.

Without these hooks no request would reach the model, or a response that is kept: no text that is made up is a
model's name or the id of a response, and few conversations end with the user's turn. And a few of them would
write thousands of tokens.
"""

from __future__ import annotations

import json
import os
import urllib.request

import schemathesis

SIDES = (("text_1", "queries"), ("text_2", "documents"))
"""The texts of a pair at /v1/score, each by one of two names: its schema cannot say that one is required."""
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 4


@schemathesis.hook
def map_body(context, body):
    """Return the body with the demo model's name where it has some text for it, with a question at the end of
    its messages, with little to write, with both texts of a pair, and with some text where that for
    relevance is empty.
    """
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(body.get("model"), str):
        changed["model"] = "demo"
    if isinstance(body.get("messages"), list) and body["messages"]:
        changed["messages"] = [*body["messages"], {"role": "user", "content": "hi"}]
    if context.operation.path.endswith("/score"):
        for names in SIDES:
            if all(body.get(name) is None for name in names):
                changed[names[0]] = "a"
    if context.operation.path.endswith("/rerank"):
        if body.get("query") == "":
            changed["query"] = "a"
        if isinstance(body.get("documents"), list):
            changed["documents"] = ["a" if document == "" else document for document in body["documents"]]
    for name in SHORT:
        given = body.get(name)
        if isinstance(given, int) and not isinstance(given, bool):
            changed[name] = min(max(given, 1), MOST)
    return changed


@schemathesis.hook
def map_path_parameters(context, path_parameters):
    """Every other id becomes that of a response which is kept, also if it was just deleted."""
    response_id = (path_parameters or {}).get("response_id")
    if not isinstance(response_id, str) or len(response_id) % 2:
        return path_parameters
    body = {"model": "demo", "input": "hi", "max_output_tokens": 1, "request_id": "kept"}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['FRONT_KEY']}"}
    url = f"{os.environ['FRONT_URL']}/v1/responses"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)):
        return {**path_parameters, "response_id": "resp_kept"}
