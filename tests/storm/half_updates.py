"""The fault of a trainer that dies, or whose bytes are lost, in the middle of new weights."""

from __future__ import annotations

import asyncio
import math

import grpc

from penstock.v1 import control_pb2, weights_pb2
from tests.service.update_calls import update_weights
from tests.service.weights.pushing import Message, chunk, commit
from tests.storm.attack import Attack
from tests.storm.honest import kind_of

CHUNK_BYTES = 1 << 20
_ITEM_BYTES = {weights_pb2.DATA_TYPE_BF16: 2, weights_pb2.DATA_TYPE_F16: 2, weights_pb2.DATA_TYPE_F32: 4}


async def half_update(attack: Attack) -> str:
    """Send new values for one tensor, by somebody who may change it or by somebody who may not. They are cut
    off before the commit, or do not have the checksum that was announced. So no answer may ever show them.
    """
    rng = attack.rng
    request = control_pb2.GetModelInfoRequest(include_tensors=True)
    try:
        info = await attack.control.GetModelInfo(request, metadata=attack.bearer("operator"))
    except grpc.aio.AioRpcError as error:
        return kind_of(error)[0]
    spec = rng.choice(info.tensors)
    data = rng.randbytes(math.prod(spec.shape) * _ITEM_BYTES[spec.dtype])
    spec.crc32c = 1
    begin = weights_pb2.UpdateWeightsBegin(
        update_id=f"{rng.getrandbits(64):x}",
        version_label="storm",
        manifest=weights_pb2.TensorManifest(tensors=[spec]),
        partial=True,
        staging=rng.choice((weights_pb2.STAGING_MODE_HOST, weights_pb2.STAGING_MODE_DEVICE)),
    )
    messages = [
        Message(begin=begin),
        *(chunk(0, at, data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES)),
        commit(len(data)),
    ]
    if rng.random() < 0.5:
        return await _cut_off(attack, messages[: rng.randrange(len(messages))])
    key = rng.choice(("operator", "operator", "attacker"))
    try:
        await update_weights(attack.address, messages, metadata=attack.bearer(key))
    except grpc.aio.AioRpcError as error:
        return f"{key}: {kind_of(error)[0]}"
    return "the update went live"


async def _cut_off(attack: Attack, messages: list[Message]) -> str:
    writing = attack.inference.UpdateWeights(metadata=attack.bearer("operator"))
    try:
        for message in messages:
            await writing.write(message)
        await asyncio.sleep(attack.rng.expovariate(20))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return "refused while it was sent"  # grpc.aio forgets why
    finally:
        writing.cancel()
    return "cut off"
