"""Fields of a config.json that cannot change what the decoder computes when serving."""

from __future__ import annotations

from typing import Final

# Training, bookkeeping, and transformers' own execution choices.
_NOT_INFERENCE = """
    architectures attention_dropout attention_probs_dropout_prob attn_implementation
    attn_pdrop classifier_dropout cross_attention_hidden_size dropout embd_pdrop embedding_dropout
    finetuning_task
    gradient_checkpointing hidden_dropout hidden_dropout_prob id2label initializer_range
    is_llama_config keys_to_ignore_at_inference label2id license max_sequence_length
    model_max_length name_or_path num_labels output_attentions output_hidden_states
    output_router_logits problem_type resid_pdrop residual_dropout return_dict
    router_aux_loss_coef router_jitter_noise
    task_specific_params tf_legacy_loss torchscript transformers_version unsloth_fixed
    unsloth_version use_bfloat16 use_cache
"""
# Tokens and text: the tokenizer and the service handle them.
_TEXT = """
    bos_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id prefix sep_token_id
    tokenizer_class transformers.js_config unk_token_id
"""
# Defaults of transformers' generate(), which old versions wrote into config.json; requests carry their own.
_GENERATION = """
    bad_words_ids begin_suppress_tokens cache_implementation chunk_size_feed_forward
    diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups
    num_beams num_return_sequences output_scores remove_invalid_values repetition_penalty
    return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""

HARMLESS_FIELDS: Final = frozenset(f"{_NOT_INFERENCE} {_TEXT} {_GENERATION}".split())
