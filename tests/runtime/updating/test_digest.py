"""The digest of an update, compared with that of a text written by hand."""

import hashlib

from penstock.runtime.sent_tensors import SentTensor
from penstock.runtime.updating.incoming import digest_of


def test_the_digest_is_that_of_one_line_for_each_tensor_by_name() -> None:
    norm, scalar = bytes(range(128)), b"\x00\x00\x80\x3f"
    text = (
        f"a.scalar F32  {hashlib.sha256(scalar).hexdigest()}\n"
        f"model.norm.weight BF16 4,16 {hashlib.sha256(norm).hexdigest()}\n"
    )
    tensors = [
        (SentTensor("model.norm.weight", "BF16", (4, 16)), hashlib.sha256(norm).digest()),
        (SentTensor("a.scalar", "F32", ()), hashlib.sha256(scalar).digest()),
    ]
    assert digest_of(tensors) == hashlib.sha256(text.encode()).digest()
    assert digest_of(reversed(tensors)) == digest_of(tensors)
