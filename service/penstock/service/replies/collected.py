"""Makes the answer of Generate of what its outputs have generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.service.replies import messages
from penstock.service.replies.pending import Taken
from penstock.service.requests.convert import ServedJob
from penstock.v1 import inference_pb2, types_pb2


class Collected:
    """All outputs of one request, delta by delta. Log-probabilities and hidden states stay bytes."""

    def __init__(self, job: ServedJob, version_of: Callable[[int], types_pb2.WeightsVersion]) -> None:
        """`version_of` tells the version of the weights of a generation."""
        self._job = job
        self._version_of = version_of
        self._outputs = [inference_pb2.Output(index=index) for index in range(job.n)]
        self._logprobs: list[list[bytes]] = [[] for _ in self._outputs]
        self._hidden: list[list[bytes]] = [[] for _ in self._outputs]
        self._num_tokens = [0] * job.n

    def add(self, index: int, taken: Taken) -> None:
        """Append a delta to output `index`. The output says from which token on other weights made it."""
        output = self._outputs[index]
        if not output.weights or output.weights[-1].version.generation != taken.weights_generation:
            output.weights.add(
                first_output_token=self._num_tokens[index], version=self._version_of(taken.weights_generation)
            )
        self._num_tokens[index] += len(taken.token_ids)
        messages.add_delta(output, taken, self._job)
        self._logprobs[index].append(taken.logprobs)
        self._hidden[index].append(taken.hidden)
        if taken.finish is not None:
            output.finish.CopyFrom(messages.finish(taken.finish))

    def response(self, message: inference_pb2.GenerateResponse, encoded_prompt: Sequence[bytes]) -> bytes:
        """Serialize a `GenerateResponse` from its small fields, its `PromptInfo` and all outputs."""
        return messages.response(message, encoded_prompt, self._outputs, self._logprobs, self._hidden)
