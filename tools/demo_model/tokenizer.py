"""The demo model's tokenizer: a byte-level BPE learnt from the grammar, written as a Hugging Face directory.

Two cuts are made before merging. Every digit stands alone, so that sums are about digits. A space joins the
lower-case word after it but not a capital, so that a name is the same tokens after a space and after a
quotation mark: copying a city into a JSON argument is then plain copying.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
VOCAB_SIZE = 2048
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = [END_OF_TEXT, IM_START, IM_END]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
"""Single tokens that stay visible in decoded text, as in Qwen's own tokenizer; <think> is there for the
protocol, the demo model does not use it."""

_CUTS = (
    r"'\p{Ll}{1,2}(?!\p{L})"  # 's 'm 'll
    r"|\p{Lu}\p{Ll}*"  # a capitalised word, without the space before it
    r"| ?[\p{Ll}\p{Lo}\p{Lt}\p{Lm}\p{M}]+"  # any other word, with it
    r"|\p{N}"  # one digit
    r"| ?[^\s\p{L}\p{M}\p{N}]+"  # punctuation
    r"|\s+(?!\S)|\s"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from rendered text; control tokens and tags take the last ids, as Qwen has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_CUTS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens, wanted {VOCAB_SIZE}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, directory / "chat_template.jinja")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer as any user of transformers loads it."""
    return AutoTokenizer.from_pretrained(str(directory))
