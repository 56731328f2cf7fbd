"""What the names of a checkpoint's tensors begin with, which differs between checkpoints of one family."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What names begin with, in the place of the usual beginnings `model.`, `lm_head.` and `visual.`."""

    decoder: str = "model."
    head: str = "lm_head."
    vision: str = "visual."

    def spelled(self, name: str) -> str:
        """A usual name as the checkpoint has it."""
        for usual, own in (("model.", self.decoder), ("lm_head.", self.head), ("visual.", self.vision)):
            if name.startswith(usual):
                return own + name.removeprefix(usual)
        return name

    def found_in(self, names: Collection[str]) -> TensorNames:
        """The beginnings that the names of a checkpoint's tensors have. Each is told by a tensor that only
        this part has; where no name or several are that tensor's, the beginning stays.
        """
        return TensorNames(
            decoder=_beginning(names, "embed_tokens.weight", self.decoder),
            head=_beginning(names, "lm_head.weight", self.head.removesuffix("lm_head.")) + "lm_head.",
            vision=_beginning(names, "patch_embed.proj.weight", self.vision),
        )


USUAL = TensorNames()


def _beginning(names: Collection[str], tensor: str, otherwise: str) -> str:
    found = [name for name in names if name == tensor or name.endswith(f".{tensor}")]
    return found[0].removesuffix(tensor) if len(found) == 1 else otherwise
