"""What Schemathesis changes in the bodies that it makes up.

Without this hook no request would reach the model: no text that is made up is a model's name, and few
conversations end with the user's turn. And a few of them would write thousands of tokens.
"""

from __future__ import annotations

import schemathesis

SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")
MOST = 4


@schemathesis.hook
def map_body(context, body):
    """The body with the demo model's name where it has some text for it, with a question at the end of its
    messages, and with little to write.
    """
    if not isinstance(body, dict):
        return body
    changed = dict(body)
    if isinstance(body.get("model"), str):
        changed["model"] = "demo"
    if isinstance(body.get("messages"), list) and body["messages"]:
        changed["messages"] = [*body["messages"], {"role": "user", "content": "hi"}]
    for name in SHORT:
        given = body.get(name)
        if isinstance(given, int) and not isinstance(given, bool):
            changed[name] = min(max(given, 1), MOST)
    return changed
