"""What the names of a checkpoint's tensors tell: what they begin with, and whether experts are stacked. Both
differ between checkpoints of one family, because versions of transformers write one model differently.

`load_config` looks at the names in the checkpoint's files, and an update's names are read in the same way. So
what would serve if it lay in the checkpoint's files may also be sent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TensorNames:
    """decoder, head, vision, projector: what names begin with, in the place of the usual `model.`,
    `lm_head.`, `visual.`, `projector.`."""

    decoder: str = "model."
    head: str = "lm_head."
    vision: str = "visual."
    projector: str = "projector."
    table: str = "embed_tokens.weight"
    """What the name of the table of embeddings ends in."""
    vision_tensor: str = "patch_embed.proj.weight"
    """What the name of the tensor that reads patches ends in."""
    projector_tensor: str = "mm_input_projection_weight"
    """What the name of the tensor that projects to the decoder's channels ends in, if it is no part of the
    encoder."""
    stacked: bool = False
    """Whether the weights of a layer's experts are stacked in one tensor."""

    def spelled(self, name: str) -> str:
        """Spell a usual name as the checkpoint has it."""
        beginnings = {
            "model.": self.decoder,
            "lm_head.": self.head,
            "visual.": self.vision,
            "projector.": self.projector,
        }
        for usual, own in beginnings.items():
            if name.startswith(usual):
                return own + name.removeprefix(usual)
        return name

    def found_in(self, names: Collection[str]) -> TensorNames:
        """Find the beginnings that the names of a checkpoint's tensors have. Each is told by a tensor that
        only this part has; where no name or several are that tensor's, the beginning stays. So does what is
        said of experts where no name is one of theirs.
        """
        head = self.head
        if head.endswith("lm_head."):
            head = _beginning(names, "lm_head.weight", head.removesuffix("lm_head.")) + "lm_head."
        return replace(
            self,
            decoder=_beginning(names, self.table, self.decoder),
            head=head,
            vision=_beginning(names, self.vision_tensor, self.vision),
            projector=_beginning(names, self.projector_tensor, self.projector),
            stacked=_is_stacked(names, otherwise=self.stacked),
        )


USUAL = TensorNames()


def _beginning(names: Collection[str], tensor: str, otherwise: str) -> str:
    found = [name for name in names if name == tensor or name.endswith(f".{tensor}")]
    return found[0].removesuffix(tensor) if len(found) == 1 else otherwise


def _is_stacked(names: Collection[str], *, otherwise: bool) -> bool:
    if any(name.endswith(".experts.gate_up_proj") for name in names):
        return True
    return otherwise and not any(name.endswith(".experts.0.gate_proj.weight") for name in names)
