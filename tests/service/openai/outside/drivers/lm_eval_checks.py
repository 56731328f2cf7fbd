"""What lm-evaluation-harness does with the OpenAI front, whose tokenizer it asks over HTTP. `run_checks.py`
runs the checks.
"""

from __future__ import annotations

import json
import math
import os
import urllib.request
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = os.getcwd()

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

PAIRS = [("Once upon a", " time"), ("The cat", " sleeps."), ("what is 3 + 4?", " 3 + 4 = 7.")]
TASK = {
    "task": "endings",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "endings.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{text}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{target}}",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


def remote(endpoint, kind="local-completions", path="completions", **more):
    os.environ["OPENAI_API_KEY"] = endpoint.key
    arguments = {
        "model": endpoint.model,
        "base_url": f"{endpoint.url}/{path}",
        "tokenizer_backend": "remote",
        "auth_token": endpoint.key,
        "max_length": 256,
        "max_retries": 1,
        **more,
    }
    return get_model(kind).create_from_arg_obj(arguments)


def prompt_logprobs(endpoint, text):
    """Return the log-probabilities of the tokens of a text, without one of an output, and the number of
    tokens.
    """
    body = {"model": endpoint.model, "prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0}
    request = urllib.request.Request(
        f"{endpoint.url}/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {endpoint.key}"},
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["logprobs"]["token_logprobs"]


def check_tokens_come_back_as_their_text(endpoint):
    tokenizer = remote(endpoint).tokenizer
    for text in "Once upon a time", "é €", "<|im_end|>", "":
        assert tokenizer.decode(tokenizer.encode(text)) == text, text
    assert tokenizer.encode(tokenizer.eos_token) == [tokenizer.eos_token_id], tokenizer.tokenizer_info


def check_chat_template_is_the_servers(endpoint):
    prompt = remote(endpoint).tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert "user\nhi<|im_end|>" in prompt, prompt


def check_loglikelihoods_are_of_the_continuation_alone(endpoint):
    """Check the harness, which takes one token of the output off the end of the list, whatever that token
    is.
    """
    model = remote(endpoint)
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
    for (context, continuation), (found, _) in zip(PAIRS, model.loglikelihood(requests), strict=True):
        num_context = len(model.tokenizer.encode(context))
        expected = sum(prompt_logprobs(endpoint, context + continuation)[num_context:])
        assert math.isclose(found, expected, rel_tol=1e-3), (context, found, expected)


def check_a_task_of_multiple_choice(endpoint):
    rows = [
        {"text": "Once upon a", "choices": [" time", " 7"], "target": 0},
        {"text": "3 + 4 =", "choices": [" 7.", " dog"], "target": 0},
    ]
    Path("endings.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = simple_evaluate(
        remote(endpoint), tasks=[TASK], task_manager=TaskManager(), bootstrap_iters=0, log_samples=False
    )
    assert made["results"]["endings"]["acc,none"] == 1.0, made["results"]


def check_generate_until(endpoint):
    request = Instance("generate_until", {}, ("Once upon a", {"until": ["."], "max_gen_toks": 20}), 0)
    (text,) = remote(endpoint).generate_until([request])
    assert text.strip(), "it writes something"
    assert "." not in text, text
