"""Fields of a config.json that change nothing here, and fields that may have one value only.

Contract: `check_known` passes a file only when every field is read by the caller, is in NEUTRAL, or has its
value of FIXED. So a field that this project has never heard of ends the load instead of changing the model
silently. Sources of the names: what transformers 4 and 5 write for any model (`PretrainedConfig`), and the
published Kimi files.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jddtree.config.fields import Fields

NEUTRAL = frozenset(
    # what the file is
    "_name_or_path name_or_path _commit_hash architectures auto_map model_type transformers_version "
    "transformers_weights tokenizer_class finetuning_task task_specific_params problem_type id2label "
    "label2id num_labels prefix "
    # training, and how a library computes the same numbers
    "attention_dropout hidden_dropout initializer_range aux_loss_alpha seq_aux router_aux_loss_coef "
    "ep_size pretraining_tp gradient_checkpointing use_cache torchscript chunk_size_feed_forward "
    "use_bfloat16 tf_legacy_loss _attn_implementation attn_implementation _experts_implementation "
    "experts_implementation base_model_tp_plan tie_encoder_decoder is_decoder "
    "keys_to_ignore_at_inference ignore_keys_at_rope_validation "
    # what a call returns
    "return_dict use_return_dict output_attentions output_hidden_states output_router_logits output_scores "
    "return_dict_in_generate num_return_sequences "
    # tokens that nothing here writes by itself, and images
    "bos_token_id pad_token_id sep_token_id decoder_start_token_id ignore_index media_placeholder_token_id "
    "image_token_id video_token_id use_unified_vision_chunk video_placeholder vision_config "
    # how to sample: the request says it
    "do_sample early_stopping length_penalty max_length temperature top_k top_p typical_p epsilon_cutoff "
    "eta_cutoff".split()
)
FIXED: Mapping[str, Any] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
}


def check_known(fields: Fields, read: Iterable[str]) -> None:
    """Raise UserError for a field that is not in `read`, NEUTRAL or FIXED, and for a value that is not
    FIXED's.
    """
    for name, value in FIXED.items():
        fields.require(name, value, "this project, which decodes token by token,")
    fields.reject_others(
        {*read, *NEUTRAL, *FIXED}, "which is not known; remove it if it does not change the result"
    )
