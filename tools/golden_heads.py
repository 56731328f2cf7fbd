"""Makes what tests compare guesses of heads with: the layer behind the last one of a golden, which predicts
the token after the next one, and what PyTorch computes with it.

    python -m tools.golden_heads --goldens tests/golden NAME ...

It needs torch and transformers, as `tools.golden` does. The layer is DeepSeek-V3's (arXiv 2412.19437, 2.2): a
layer of the model's family reads, at position i, the hidden state of position i - 1 behind the model's last
norm, and the embedding of token i. It is trained a little on the golden's own outputs, so that some of its
guesses are right. transformers has no such layer, so the parts around the family's layer are written here.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn

GUESSES = 3
"""How many tokens are guessed behind each token."""
TRAINING_STEPS = 18


class Head(nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """The layer, with the model's own embeddings, rotation and head."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        config, parts = model.config, model.model
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = nn.RMSNorm(size, eps), nn.RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = copy.deepcopy(parts.layers[-1])
        self.block.self_attn.layer_idx = 0
        self.norm = nn.RMSNorm(size, eps)
        self.others = (parts.embed_tokens, parts.rotary_emb, model.lm_head)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn tokens [T] and the hidden states before them [T, E] -> hidden states [T, E] and logits
        [T, V].
        """
        embed, rotary, lm_head = self.others
        both = torch.cat([self.enorm(embed(tokens)), self.hnorm(before)], dim=-1)
        x = self.eh_proj(both)[None]
        count = len(tokens)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.block(
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions)
        )
        hidden = self.norm((out[0] if isinstance(out, tuple) else out).reshape(count, -1))
        return hidden, lm_head(hidden)

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of a checkpoint."""
        names = {"norm": "shared_head.norm"}
        found: dict[str, torch.Tensor] = {}
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            part, rest = name.split(".", 1)
            there = rest if part == "block" else f"{names.get(part, part)}.{rest}"
            found |= _apart(f"model.layers.{layer}.{there}", value.detach())
        return found


def _apart(name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """Take a tensor apart as checkpoints have it: each expert has matrices of its own, and gate and up are
    two.
    """
    experts, stacked, what = name.rpartition("experts.")
    if not stacked or "shared_experts" in name:
        return {name: value.clone().contiguous()}
    parts = ("gate_proj", "up_proj") if what == "gate_up_proj" else (what,)
    return {
        f"{experts}experts.{i}.{part}.weight": matrix.clone().contiguous()
        for i, of_expert in enumerate(value)
        for part, matrix in zip(parts, of_expert.chunk(len(parts)), strict=True)
    }


def before_each(hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden state before each token: zeros before the first one."""
    return torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])


def guessed(head: Head, tokens: torch.Tensor, before: torch.Tensor) -> list[int]:
    """Guess what follows these tokens, guess after guess: each further guess reads the layer's own output."""
    made: list[int] = []
    for _ in range(GUESSES):
        hidden, logits = head(tokens, before)
        made.append(int(logits[-1].argmax()))
        tokens = torch.cat([tokens, torch.tensor(made[-1:])])
        before = torch.cat([before, hidden[-1:]])
    return made


def make(name: str, goldens: Path) -> None:
    """Write the layer of one golden and what it guesses."""
    torch.manual_seed(1)
    folder, out = goldens / name, goldens / "heads" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    head = Head(model)
    for value in head.parameters():
        value.data += 0.05 * torch.randn_like(value)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    texts = [torch.tensor([*case["prompt"], *case["tokens"]]) for case in cases]
    with torch.no_grad():
        states = [before_each(model.model(text[None]).last_hidden_state[0]) for text in texts]
    trained = [value for part, value in head.named_parameters() if "correction" not in part]
    optimizer = torch.optim.Adam(trained, lr=3e-3)
    for _ in range(TRAINING_STEPS):
        loss = sum(
            nn.functional.cross_entropy(head(text[:-1], state[:-1])[1], text[1:])
            for text, state in zip(texts, states, strict=True)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found: list[dict[str, list[Any]]] = []
    with torch.no_grad():
        for case, text, state in zip(cases, texts, states, strict=True):
            begin = len(case["prompt"]) + 1
            logits = head(text[:begin], state[:begin])[1][-1]
            top = torch.topk(logits, 8)
            found.append(
                {
                    "guesses": [guessed(head, text[:end], state[:end]) for end in range(begin, len(text))],
                    "first_logits_top": [
                        [int(i), float(value)] for value, i in zip(top.values, top.indices, strict=True)
                    ],
                }
            )
    out.mkdir(parents=True, exist_ok=True)
    save_file(head.tensors(model.config.num_hidden_layers), out / "layer.safetensors")
    (out / "expected.json").write_text(json.dumps({"cases": found}) + "\n")
    right = sum(
        text[len(case["prompt"]) + 1 + i] == guesses[0]
        for case, text, each in zip(cases, texts, found, strict=True)
        for i, guesses in enumerate(each["guesses"])
    )
    print(f"{name}: {right} first guesses are right, loss {loss.item():.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make layers that predict further tokens, for goldens.")
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--goldens", type=Path, required=True, help="the folder of the goldens")
    arguments = parser.parse_args()
    for name in arguments.names:
        make(name, arguments.goldens)


if __name__ == "__main__":
    main()
