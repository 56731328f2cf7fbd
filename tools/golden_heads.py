"""Makes what tests compare guesses of heads with: the layer behind the last one of a golden, which predicts
the token after the next one, or an EAGLE head of it; and what PyTorch computes with it.

    python -m tools.golden_heads --goldens tests/golden [--eagle] NAME ...

It needs torch and transformers, as `tools.golden` does. The layer is DeepSeek-V3's (arXiv 2412.19437, 2.2): a
layer of the model's family reads, at position i, the hidden state of position i - 1 behind the model's last
norm, and the embedding of token i. It is trained a little on the golden's own outputs, so that some of its
guesses are right. transformers has no such layer, so the parts around the family's layer are written here.

MiMo is a Qwen2, so its layer is made for that golden.

An EAGLE-3 head (arXiv 2503.01840, and the authors' code) begins with the second token: it reads, at its
position i, token i + 1 and what `fc` makes of three hidden states of position i of the model.
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
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRotaryEmbedding

GUESSES = 3
"""How many tokens are guessed behind each token."""
TRAINING_STEPS = 18
EAGLE_STEPS = 60


class Head(nn.Module):  # type: ignore[misc]  # torch is not there where types are checked
    """The layer, with the model's own embeddings, rotation and head."""

    def __init__(self, model: nn.Module, *, hidden_first: bool) -> None:
        super().__init__()
        self.hidden_first = hidden_first
        parts, size, eps = model.model, model.config.hidden_size, model.config.rms_norm_eps
        norm = type(parts.norm)
        self.enorm, self.hnorm = norm(size, eps=eps), norm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = copy.deepcopy(parts.layers[-1])
        self.block.self_attn.layer_idx = 0
        self.norm = norm(size, eps=eps)
        self.others = (parts.embed_tokens, parts.rotary_emb, model.lm_head)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn tokens [T] and the hidden states before them [T, E] -> hidden states [T, E] and logits
        [T, V].
        """
        embed, rotary, lm_head = self.others
        both = [self.enorm(embed(tokens)), self.hnorm(before)]
        x = self.eh_proj(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))[None]
        count = len(tokens)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        out = self.block(
            x, attention_mask=mask, position_ids=positions, position_embeddings=rotary(x, positions)
        )
        hidden = self.norm((out[0] if isinstance(out, tuple) else out).reshape(count, -1))
        return hidden, lm_head(hidden)

    def tensors(self, begins: dict[str, str]) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of a checkpoint, which begin so for each part."""
        found: dict[str, torch.Tensor] = {}
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            part, rest = name.split(".", 1)
            found |= _apart(f"{begins[part]}.{rest}", value.detach())
        return found


def begins_of(name: str, layer: int) -> dict[str, str]:
    """Return what the names of the parts' tensors begin with: vLLM and SGLang read them so."""
    if name == "mimo":
        there = "model.mtp_layers.0"
        return {
            "enorm": f"{there}.token_layernorm",
            "hnorm": f"{there}.hidden_layernorm",
            "eh_proj": f"{there}.input_proj",
            "block": there,
            "norm": f"{there}.final_layernorm",
        }
    if name.startswith("qwen3"):
        return {
            "enorm": "mtp.pre_fc_norm_embedding",
            "hnorm": "mtp.pre_fc_norm_hidden",
            "eh_proj": "mtp.fc",
            "block": "mtp.layers.0",
            "norm": "mtp.norm",
        }
    there = f"model.layers.{layer}"
    same = {part: f"{there}.{part}" for part in ("enorm", "hnorm", "eh_proj")}
    return {**same, "block": there, "norm": f"{there}.shared_head.norm"}


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


def _mlp(config: transformers.LlamaConfig) -> nn.Module:
    return LlamaMLP(config)  # type: ignore[no-untyped-call]  # transformers leaves it unannotated


class Eagle(nn.Module):  # type: ignore[misc]  # see Head
    """An EAGLE-3 head, written from its definition."""

    def __init__(self, model: nn.Module, fields: dict[str, Any]) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**fields)
        config._attn_implementation = "eager"
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.is_normed = fields.get("norm_before_residual", False)
        self.fc = nn.Linear(3 * model.config.hidden_size, hidden, bias=False)
        layer = nn.Module()
        layer.input_layernorm, layer.hidden_norm = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        layer.self_attn = LlamaAttention(config, 0)
        for part in ("q_proj", "k_proj", "v_proj"):
            size = getattr(layer.self_attn, part).out_features
            setattr(layer.self_attn, part, nn.Linear(2 * hidden, size, bias=False))
        layer.post_attention_layernorm, layer.mlp = nn.RMSNorm(hidden, eps), _mlp(config)
        self.midlayer = layer
        self.norm = nn.RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, fields["draft_vocab_size"], bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.embed_tokens = (
            nn.Embedding(config.vocab_size, hidden) if "target_hidden_size" in fields else None
        )
        self.others = (model.model.embed_tokens,)

    def forward(self, tokens: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Turn tokens [T] from the second one on, and `fc` of the hidden states before them [T, E] -> hidden
        states [T, E] and logits [T, V of the head].
        """
        layer, embed = self.midlayer, self.embed_tokens or self.others[0]
        normed = layer.hidden_norm(before)
        both = torch.cat([layer.input_layernorm(embed(tokens)), normed], dim=-1)[None]
        count = len(tokens)
        turns = self.rotary(both, torch.arange(count)[None])
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        attended = layer.self_attn(both, position_embeddings=turns, attention_mask=mask)[0][0]
        x = (normed if self.is_normed else before) + attended
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.lm_head(self.norm(x))

    def tensors(self, *, is_plain: bool) -> dict[str, torch.Tensor]:
        """Return the tensors under the names of a checkpoint; is_plain: those of which all but the head begin
        with `model.`.
        """
        found = {}
        for name, value in self.named_parameters():
            if is_plain and not name.startswith("lm_head."):
                name = "model." + name.replace("midlayer.", "layers.0.")
            found[name] = value.detach().clone().contiguous()
        return found


EAGLES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "draft_vocab_size": 160,
        "norm_before_residual": False,
    },
    "qwen3": {
        "hidden_size": 32,
        "target_hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "draft_vocab_size": 512,
        "norm_before_residual": True,
    },
}
"""Sizes of the heads, by the golden whose head each is. The first has its target's embeddings and some of its
tokens; the second has embeddings of its own, of another size, and all tokens.
"""


def inner_states(model: nn.Module, text: torch.Tensor, taps: list[int]) -> torch.Tensor:
    """Return what the layers of these numbers read of a text, side by side, [T, taps * E]; the number of the
    layers stands for what the last one gives, before the norm.
    """
    parts, read = model.model, list[torch.Tensor]()

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        read.append(inputs[0][0])

    hooks = [each.register_forward_pre_hook(keep) for each in (*parts.layers, parts.norm)]
    model(text[None])
    for hook in hooks:
        hook.remove()
    return torch.cat([read[tap] for tap in taps], dim=-1)


def make_eagle(name: str, goldens: Path) -> None:
    """Write an EAGLE head of one golden, and what it guesses."""
    torch.manual_seed(3)
    folder, out = goldens / name, goldens / "heads" / f"eagle_{name}"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    fields = {
        **EAGLES[name],
        "vocab_size": model.config.vocab_size,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20_000.0,
    }
    head, count = Eagle(model, fields), fields["draft_vocab_size"]
    for value in head.parameters():
        value.data += 0.05 * torch.randn_like(value)
    cases = json.loads((folder / "expected.json").read_text())["cases"]
    texts = [torch.tensor([*case["prompt"], *case["tokens"]]) for case in cases]
    if is_plain := count == fields["vocab_size"]:
        known = torch.arange(count)
    else:
        seen = torch.tensor(sorted({token for case in cases for token in case["tokens"]}))
        others = torch.tensor([i for i in range(fields["vocab_size"]) if i not in set(seen.tolist())])
        known = torch.cat([seen, others[torch.randperm(len(others))[: count - len(seen)]]]).sort().values
    places = {int(token): i for i, token in enumerate(known)}
    taps = [0, 1, 2]
    with torch.no_grad():
        states = [inner_states(model, text, taps) for text in texts]
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for _ in range(EAGLE_STEPS):
        loss = torch.zeros(())
        for text, state in zip(texts, states, strict=True):
            wanted = torch.tensor([places.get(int(token), -100) for token in text[2:]])
            logits = head(text[1:-1], head.fc(state[:-2]))[1]
            loss = loss + nn.functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found: list[dict[str, list[Any]]] = []
    with torch.no_grad():
        for case, text, state in zip(cases, texts, states, strict=True):
            guesses, tops = list[list[int]](), list[Any]()
            for end in range(len(case["prompt"]) + 1, len(text)):
                tokens, before, made = text[1:end], head.fc(state[: end - 1]), []
                for _ in range(GUESSES):
                    hidden, logits = head(tokens, before)
                    tops.append(torch.topk(logits[-1], 8))
                    made.append(int(known[logits[-1].argmax()]))
                    tokens = torch.cat([tokens, torch.tensor(made[-1:])])
                    before = torch.cat([before, hidden[-1:]])
                guesses.append(made)
            top = [[int(i), float(value)] for value, i in zip(tops[0].values, tops[0].indices, strict=True)]
            found.append({"guesses": guesses, "first_logits_top": top})
            gaps = [float(each.values[0] - each.values[1]) for each in tops]
            print(f"{name}: the two likeliest guesses differ by at least {min(gaps):.1e}")
    out.mkdir(parents=True, exist_ok=True)
    tensors = head.tensors(is_plain=is_plain)
    if not is_plain:
        tensors["d2t"] = known - torch.arange(count)
        tensors["t2d"] = torch.isin(torch.arange(fields["vocab_size"]), known)
    save_file(tensors, out / "model.safetensors")
    written = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **fields,
        "eagle_aux_hidden_state_layer_ids": taps,
        "dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    (out / "expected.json").write_text(json.dumps({"cases": found}) + "\n")
    right = sum(
        text[len(case["prompt"]) + 1 + i] == guesses[0]
        for case, text, each in zip(cases, texts, found, strict=True)
        for i, guesses in enumerate(each["guesses"])
    )
    print(f"{name}: {right} first guesses are right, loss {loss.item():.2f}")


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
    folder, out = goldens / ("qwen2" if name == "mimo" else name), goldens / "heads" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    head = Head(model, hidden_first=name == "mimo")
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
    save_file(head.tensors(begins_of(name, model.config.num_hidden_layers)), out / "layer.safetensors")
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
    parser.add_argument("--eagle", action="store_true", help="make EAGLE heads")
    parser.add_argument("--goldens", type=Path, required=True, help="the folder of the goldens")
    arguments = parser.parse_args()
    for name in arguments.names:
        (make_eagle if arguments.eagle else make)(name, arguments.goldens)


if __name__ == "__main__":
    main()
