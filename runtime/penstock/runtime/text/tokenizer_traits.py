"""What a tokenizer of transformers shows of itself, and of the model that it belongs to."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase, TokenizersBackend

from penstock.runtime.chat.forms import harmony
from penstock.runtime.chat.template import render_here
from penstock.runtime.chat.template_sandbox import TemplateFailed

_ANSWER = "The answer is forty-two."


def is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer is one of Hugging Face's fast ones that changes nothing of how they encode."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, TokenizersBackend)
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind._encode_plus is TokenizersBackend._encode_plus
    )


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a text or a turn: the tokenizer's own end token, and the one that the model's chat
    template writes directly after what an assistant has said. In Harmony, where an answer is one of several
    messages, they are the markers after the last of them.

    A checkpoint may say so nowhere else. With the end tokens of its configuration alone, which may be those
    of the model that it was trained from, its model would go on after its turn.
    """
    found = frozenset() if tokenizer.eos_token_id is None else frozenset([int(tokenizer.eos_token_id)])
    tokens = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        return found
    if harmony.CHANNEL in template and harmony.MESSAGE in template:
        return found | {tokens[end] for end in (harmony.CALL, harmony.RETURN) if end in tokens}
    after = _written_after_an_answer(tokenizer, template)
    longest = max(
        ((len(token), i) for token, i in tokens.items() if after.startswith(token)),
        default=None,
    )
    return found if longest is None else found | {longest[1]}


def _written_after_an_answer(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """What the template writes after a conversation's last words, if they are the assistant's; "" where it
    does not take such a conversation.
    """
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = render_here(
            {
                **tokenizer.special_tokens_map,
                "conversations": [turns],
                "tools": None,
                "chat_template": template,
                "add_generation_prompt": False,
            }
        )
    except TemplateFailed:
        return ""
    return text.rpartition(_ANSWER)[2]
