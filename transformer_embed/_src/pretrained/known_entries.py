"""What is known of an entry of config.json that a model type does not read.

There are three cases. An entry that changes the input or output layer of other models is refused,
except if the value changes nothing. An entry that is about something else is left out. For an entry
that is not known, the caller gets a warning.
"""

from typing import Any

from transformer_embed._src.pretrained.class_entries import CLASS_ENTRIES
from transformer_embed._src.pretrained.entries import ENTRIES, ENTRY_OF_NAME

# Entries that no known type reads, and that change the input or the output layer of some model: the
# switches of published code, and the entries of unknown types for positions, rotations, scales and
# tables.
LOUD = (
    "alibi altup_correct_scale asm cla_share_factor compress_rope_parameters "
    "emb_layer_norm_after emb_layer_norm_before emb_pdrop embd_pdrop embed_dropout "
    "embed_positions embedding_dropout embedding_fraction embedding_scale "
    "embeddings_scale_by_sqrt_dim extra_pos_embeddings has_relative_attention_bias laurel_rank "
    "layernorm_embedding learned_pos_emb mask_emb max_xpath_subs_unit_embeddings "
    "max_xpath_tag_unit_embeddings mrope_interleaved mup_denominator norm_rel_ebd "
    "normalize_embedding offset_alibi output_multiplier position_bias_max_distance "
    "position_bias_num_buckets position_biased_input position_buckets positive_label_weight "
    "rel_2d_pos_bins rel_pos_bins relative_attention rope_interleaved rope_ratio "
    "rope_scaling_layers rotary rotary_emb_scale_base rotary_embedding_base rotary_scaling_factor "
    "rotary_value share_embedding share_inout_emb share_tables sinusoidal_embeddings "
    "sinusoidal_pos_embds softcap static_position_embeddings text_embed theta tie_weights_ "
    "untie_r use_absolute_position_embeddings use_embedding_sharing use_lang_emb "
    "use_learned_position_embeddings use_mrope use_pos_enc use_rel_pos use_relative_position_bias "
    "xdrope_section"
)

# Entries of published files that no class of transformers has, and that concern neither an input
# nor an output layer: of training, quantization, attention, other parts, and older versions.
IN_FILES = (
    "add_bias_logits add_classification_head add_final_layer_norm add_full_attention_sink_bias "
    "add_swa_attention_sink_bias anyres_pooling_size anyres_vit_max_image_size "
    "anyres_vit_two_views attention_head_dim attn_impl attn_implementation attn_output_gate "
    "attn_type_list auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens "
    "bias_dropout_fusion block_configs cache_implementation class_num classif_dropout "
    "classifier_activation cross_attention_hidden_size decoder_start_token_id "
    "dense_list dense_seq_output dflash_config directionality down_scale_factor draft_vocab_size "
    "eagle_config emb_pooler eod_token_id ep_size expert_dtype expert_intermediate_size "
    "experts_per_token fc_norm feed_forward_type finetuning_task for_llm_compressor "
    "forced_bos_token_id forced_decoder_ids forced_eos_token_id full_attn_mod fused_bias_fc "
    "fused_dropout_add_ln gap_size gradient_checkpointing hidden_activation id2label im_end_id "
    "im_newline_id im_start_id index_share_for_mtp_iteration index_skip_topk_offset "
    "index_topk_freq index_topk_pattern indexer_rope_interleave init_config "
    "initial_context_length initializer_cutoff_factor inner_group_num interpolate_factor "
    "is_llama_config label2id layer_norm_type layernorm_epsilon load_trained_adapters "
    "logn_attention_clip1 logn_attention_scale lora_alpha lora_rank mamba_ssm_dtype mask_init_id "
    "masked_softmax_fusion max_seq_len_cached max_seq_length max_sequence_length "
    "max_trained_positions mla_use_nope mlp_expansion_factor mlp_fc1_bias mlp_fc2_bias mlp_type "
    "model_max_length moe_frequency moe_layer_freq moe_router_dtype move_model_to_device "
    "mtp_num_hidden_layers mtp_transformer_layers mtp_use_dedicated_embeddings net_structure_type "
    "norm_output normalize_before num_global_key_value_heads num_hash_layers num_image_tokens "
    "num_media_embeds num_memory_blocks num_mtp_modules num_target_layers org_vocab_size "
    "output_past pack_qkv pad_id pad_vocab_size_multiple parallel_block parallel_block_tied_norm "
    "pool_type pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type position_embedding_xdrope prefix prenorm pretraining_tp "
    "problem_type pruned_heads qk_norm qk_norm_type qkv_proj_bias quantization_config "
    "reference_compile repad_logits_with_grad selective_checkpoint_enabled sep_token_id seq_aux "
    "seq_length sequence_parallel_enabled share_att_key skip_bias_add skip_bias_add_qkv "
    "softmax_scale suppress_tokens swa_head_dim swa_num_attention_heads swa_num_key_value_heads "
    "swa_v_head_dim target_hidden_size target_model_type task_specific_params text_end_id "
    "text_start_id tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript "
    "transformers_version truncate_dim unk_token_id unpad_inputs unsloth_fixed unsloth_version "
    "use_bfloat16 use_cla use_cw_loss use_flash_attention use_flash_attn "
    "use_memory_efficient_attention use_mla use_mtp use_qk_norm use_reentrant use_rms_norm "
    "use_rotary_pos_emb use_routing_bias use_xentropy verbose video_end_id video_start_id "
    "vision_num_cross_attention_layers vit_add_patchemb_bias vit_input_resolution "
    "vit_mapping_type vit_norm_type vit_patch vit_path vit_remove_prenorm vit_token vit_type "
    "vit_used_rms_norm xla_device"
)

# The entries that the JSON object of a rotation may hold, but that transformers does not read.
UNREAD_IN_ROTATIONS = ("max_position_embeddings", "finetuned", "attn_factor")

_LOUD = frozenset(LOUD.split())
_KNOWN = frozenset((*ENTRY_OF_NAME, *ENTRIES, *_LOUD, *CLASS_ENTRIES.split(), *IN_FILES.split()))


def is_loud(entry: str) -> bool:
    """Returns whether an entry that is not read may change the input or the output layer."""
    name = ENTRY_OF_NAME.get(entry, entry)
    return entry in _LOUD or (name in ENTRIES and ENTRIES[name].is_loud)


def is_known(entry: str) -> bool:
    """Returns whether an entry is in one of the lists of this package, so no warning is needed."""
    return entry in _KNOWN


def changes_nothing(value: Any) -> bool:
    """Returns whether a value switches its entry off, in any model.

    These are null, 0, False, an empty value, a factor of 1 (but not True, which equals 1), and
    "absolute", the usual value of `position_embedding_type`.
    """
    is_factor_of_1 = value == 1 and value is not True
    return not value or is_factor_of_1 or value == "absolute"
