"""Train the demo model from the grammar alone and write its checkpoint.

    python -m tools.demo_model.train --work /tmp/demo --out runtime/penstock/runtime/loading/demo_model

The path: 1. the grammar writes documents from the seed; 2. the chat template renders the chats; 3. a
tokenizer is learnt from a part of them; 4. documents are packed into rows of 256 tokens: of the first stream,
then of the second, rich in one exercise, and at the end in rows of 512 that take the longest ones too;
5. Muon and Adam with warm-up, a level stretch and a decay; 6. export as bf16 safetensors.

State is saved every `--save-every` steps under --work and picked up again with --resume: a batch depends on
its step alone.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon
from tokenizers import Tokenizer
from tqdm import tqdm

from tools.demo_model import data
from tools.demo_model.export import write_checkpoint
from tools.demo_model.grammar import LATE, documents, late_documents
from tools.demo_model.model import ModelConfig, Params, init_params, loss_fn, parameter_shapes
from tools.demo_model.tokenizer import train_tokenizer

TOKENIZER_DOCUMENTS = 20_000
HELD_OUT = 2_000
"""Documents written from another seed, for the validation loss."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast: steps of `tokens_per_step` tokens.

    The last `late_share` of them are drawn from the second stream, the last `long_share` in rows of 512.
    """

    steps: int
    peak: float = 4e-3
    adam_peak: float = 3e-3
    warmup: int = 50
    decay_share: float = 0.3
    late_share: float = 0.6
    long_share: float = 0.15
    tokens_per_step: int = 2048

    def rate(self, peak: float) -> optax.Schedule:
        """Choose the rate: warm-up, level, linear decay to a hundredth."""
        decay = int(self.steps * self.decay_share)
        parts = [
            optax.linear_schedule(0.0, peak, self.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * 0.01, decay),
        ]
        return optax.join_schedules(parts, [self.warmup, self.steps - decay])

    def optimizer(self, config: ModelConfig) -> optax.GradientTransformation:
        """Make the optimizer: Muon for the matrices inside the layers, Adam for embedding and norms,
        gradients clipped to norm 1.

        Muon costs a fifth more time a step here and needs fewer of them, which is what a CPU has to save.
        """
        inner = {
            name: MuonDimensionNumbers() if len(shape) == 2 and "embed" not in name else None
            for name, shape in parameter_shapes(config).items()
        }
        muon_part = muon(
            self.rate(self.peak),
            weight_decay=0.05,
            adam_b2=0.98,
            adam_learning_rate=self.rate(self.adam_peak),
            muon_weight_dimension_numbers=inner,
            consistent_rms=0.2,  # updates of Adam's size, so that the rates compare
        )
        return optax.chain(optax.clip_by_global_norm(1.0), muon_part)

    def source(self, step: int) -> tuple[bool, int]:
        """Return (whether this step's batch is of the second stream, its row length)."""
        late, long = (step >= round(self.steps * (1 - part)) for part in (self.late_share, self.long_share))
        return late, 512 if long else 256


class Batches:
    """Rows of both streams; the batch of a step is a function of the step."""

    def __init__(
        self, early: list[data.Example], late: list[data.Example], schedule: Schedule, seed: int
    ) -> None:
        self._schedule = schedule
        # One token more than the length: inputs and targets are shifted views of a row.
        self._rows = {
            (False, 256): data.pack(early, 257, seed),
            (True, 256): data.pack(late, 257, seed),
            (True, 512): data.pack(late, 513, seed),
        }

    def at(self, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (tokens, segments, weights), each [batch, length + 1]."""
        late, length = self._schedule.source(step)
        rows, batch = self._rows[late, length], self._schedule.tokens_per_step // length
        index = np.arange(step * batch, (step + 1) * batch) % len(rows.tokens)
        return rows.tokens[index], rows.segments[index], rows.weights[index]


def make_step(config: ModelConfig, optimizer: optax.GradientTransformation) -> Any:
    """Compile the training step; parameters and optimizer state are donated."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, batch: tuple[jax.Array, ...]) -> tuple[Params, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch, config)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def held_out_loss(params: Params, config: ModelConfig, rows: data.Rows) -> float:
    """Compute the mean loss in nats per counted token over the first rows of the held-out documents."""
    evaluate = jax.jit(lambda p, t, s, w: loss_fn(p, t, s, w, config))
    starts = range(0, min(len(rows.tokens), 128) - 15, 16)
    parts = [(rows.tokens[i : i + 16], rows.segments[i : i + 16], rows.weights[i : i + 16]) for i in starts]
    losses = [float(evaluate(params, *map(jnp.asarray, part))) for part in parts]
    return float(np.average(losses, weights=[part[2][:, 1:].sum() for part in parts]))


def save_state(path: Path, step: int, params: Params, state: Any) -> None:
    """Save everything needed to go on, in one file that is never half written."""
    leaves: dict[str, Any] = {
        f"state{i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves((params, state)))
    }
    with (path.with_suffix(".tmp")).open("wb") as file:
        np.savez(file, step=step, **leaves)
    path.with_suffix(".tmp").replace(path)


def load_state(path: Path, params: Params, state: Any) -> tuple[int, Params, Any]:
    """Load a state, as the inverse of `save_state`, into trees of the same form."""
    with np.load(path) as file:
        leaves = [jnp.asarray(file[f"state{i}"]) for i in range(len(jax.tree.leaves((params, state))))]
        params, state = jax.tree.unflatten(jax.tree.structure((params, state)), leaves)
        return int(file["step"]), params, state


def prepare(seed: int, num_documents: int, late_kind: str) -> tuple[Tokenizer, list[list[data.Example]]]:
    """Return (tokenizer, examples of the first stream, of the second, of the held-out documents)."""
    texts = [data.render(d) for d in tqdm(documents(seed, num_documents), "grammar", num_documents)]
    tokenizer = train_tokenizer(texts[:TOKENIZER_DOCUMENTS])
    late = [data.render(d) for d in late_documents(seed + 1, num_documents // 4, late_kind)]
    held_out = [data.render(d) for d in documents(seed + 1_000_000, HELD_OUT)]
    return tokenizer, [data.encode(tokenizer, part) for part in (texts, late, held_out)]


def train(args: argparse.Namespace) -> None:
    """Run steps 1 to 6 of the module's path."""
    args.work.mkdir(parents=True, exist_ok=True)
    config, schedule = ModelConfig(), Schedule(args.steps, late_share=args.late_share)
    tokenizer, (early, late, held_out) = prepare(args.seed, args.documents, args.late)
    batches, validation = Batches(early, late, schedule, args.seed), data.pack(held_out, 257, args.seed)
    optimizer = schedule.optimizer(config)
    params = init_params(config, args.seed)
    state = optimizer.init(params)
    first = 0
    if args.resume:
        first, params, state = load_state(args.work / "state.npz", params, state)
    step_fn = make_step(config, optimizer)
    size = sum(value.size for value in params.values())
    print(f"{size / 1e6:.2f} M parameters", flush=True)
    recent: list[float] = []
    began = time.monotonic()
    until = min(args.until or args.steps, args.steps)
    bar = tqdm(range(first, until), "train", initial=first, total=until, mininterval=5)
    for step in bar:
        params, state, loss = step_fn(params, state, tuple(map(jnp.asarray, batches.at(step))))
        recent = [*recent[-49:], float(loss)]
        bar.set_postfix(loss=f"{np.mean(recent):.4f}", refresh=False)
        if (step + 1) % args.save_every == 0 or step + 1 == until:
            save_state(args.work / "state.npz", step + 1, params, state)
            total = write_checkpoint(params, config, tokenizer, args.work / "checkpoint")
            line = {"step": step + 1, "train_loss": round(float(np.mean(recent)), 4), "bytes": total,
                    "held_out_loss": round(held_out_loss(params, config, validation), 4),
                    "seconds": round(time.monotonic() - began)}  # fmt: skip
            print(json.dumps(line), flush=True)
    if args.out is not None:
        print("written", write_checkpoint(params, config, tokenizer, args.out), "bytes to", args.out)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=520)
    parser.add_argument("--until", type=int, default=None, help="stop here, in the schedule of --steps")
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--late-share", type=float, default=0.6, help="steps on the second stream")
    parser.add_argument(
        "--late", choices=sorted(LATE), default="sums", help="what the second stream is rich in"
    )
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument(
        "--work", type=Path, required=True, help="where state and snapshots go while training"
    )
    parser.add_argument("--out", type=Path, default=None, help="where the finished checkpoint goes")
    parser.add_argument("--resume", action="store_true")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
