"""The defaults of the entries of attention, by the types whose attention is described.

tests/pretrained/make_class_entries.py writes this file from the configuration classes of
transformers 5.24.0.
"""
# ruff: noqa: E501

ATTENTION_DEFAULTS = """\
afmoe num_attention_heads=16 head_dim=128 norm_eps=1e-05
apertus num_attention_heads=32 norm_eps=1e-05
apertus1p5_text num_attention_heads=32 norm_eps=1e-05
arcee num_attention_heads=32 norm_eps=1e-05
aria_text num_attention_heads=32 norm_eps=1e-06
bitnet num_attention_heads=20 num_key_value_heads=5 norm_eps=1e-05
cohere num_attention_heads=64 norm_eps=1e-05
cohere2 num_attention_heads=64 norm_eps=1e-05
cohere2_moe num_attention_heads=64 head_dim=128 norm_eps=1e-05
cosmos3_edge_text num_attention_heads=16 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
cwm num_attention_heads=48 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
diffllama num_attention_heads=32 norm_eps=1e-05
doge num_attention_heads=8 norm_eps=1e-06
embedding_gemma2_text num_attention_heads=4 num_key_value_heads=2 head_dim=256 norm_eps=1e-06
emu3_text_model num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
ernie4_5 num_attention_heads=16 num_key_value_heads=2 head_dim=128 norm_eps=1e-05
ernie4_5_moe num_attention_heads=20 num_key_value_heads=4 norm_eps=1e-05
eurobert num_attention_heads=12 norm_eps=1e-05
exaone4 num_attention_heads=32 num_key_value_heads=32 norm_eps=1e-05
exaone4_5_text num_attention_heads=32 num_key_value_heads=32 norm_eps=1e-05
exaone_moe num_attention_heads=32 num_key_value_heads=32 norm_eps=1e-05
flex_olmo num_attention_heads=32 norm_eps=1e-06
flint num_attention_heads=32 num_key_value_heads=4 head_dim=128 norm_eps=1e-06
gemma num_attention_heads=16 num_key_value_heads=16 head_dim=256 norm_eps=1e-06
gemma2 num_attention_heads=8 num_key_value_heads=4 head_dim=256 query_pre_attn_scalar=256 attn_logit_softcapping=50.0 norm_eps=1e-06
gemma3 num_attention_heads=8 num_key_value_heads=4 head_dim=256 query_pre_attn_scalar=256 norm_eps=1e-06
gemma3_text num_attention_heads=8 num_key_value_heads=4 head_dim=256 query_pre_attn_scalar=256 norm_eps=1e-06
gemma3n_text num_attention_heads=8 num_key_value_heads=2 head_dim=256 norm_eps=1e-06
gemma4_text num_attention_heads=8 num_key_value_heads=4 head_dim=256 norm_eps=1e-06
gemma4_unified_text num_attention_heads=8 num_key_value_heads=4 head_dim=256 norm_eps=1e-06
glm num_attention_heads=32 num_key_value_heads=2 head_dim=128 norm_eps=1.5625e-07
glm4 num_attention_heads=32 num_key_value_heads=2 head_dim=128 norm_eps=1.5625e-07
glm4_moe num_attention_heads=96 num_key_value_heads=8 norm_eps=1e-05
glm4v_moe_text num_attention_heads=96 num_key_value_heads=8 norm_eps=1e-05
glm4v_text num_attention_heads=32 num_key_value_heads=2 norm_eps=1e-05
glm_image_text num_attention_heads=32 num_key_value_heads=2 norm_eps=1e-05
glm_ocr_text num_attention_heads=16 num_key_value_heads=8 norm_eps=1e-05
gpt_neox num_attention_heads=64 norm_eps=1e-05
gpt_neox_japanese num_attention_heads=32 norm_eps=1e-05
gpt_oss num_attention_heads=64 num_key_value_heads=8 head_dim=64 norm_eps=1e-05
granite num_attention_heads=32 attention_multiplier=1.0 norm_eps=1e-06
granite_docling_text num_attention_heads=16 num_key_value_heads=4 attention_multiplier=0.015625 norm_eps=1e-05
granite_swa num_attention_heads=20 num_key_value_heads=4 attention_multiplier=1.0 norm_eps=1e-05
granitemoe num_attention_heads=32 attention_multiplier=1.0 norm_eps=1e-06
granitemoe_swa num_attention_heads=32 attention_multiplier=1.0 norm_eps=1e-06
granitemoeshared num_attention_heads=32 attention_multiplier=1.0 norm_eps=1e-06
helium num_attention_heads=20 num_key_value_heads=20 head_dim=128 norm_eps=1e-08
higgs_audio_v2 num_attention_heads=24 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
hunyuan_v1_dense num_attention_heads=32 norm_eps=1e-05
hunyuan_v1_moe num_attention_heads=32 norm_eps=1e-05
hunyuan_vl num_attention_heads=32 norm_eps=1e-05
hunyuan_vl_text num_attention_heads=32 norm_eps=1e-05
hy_v3 num_attention_heads=64 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
hyperclovax num_attention_heads=32 norm_eps=1e-06
internlm3 num_attention_heads=32 num_key_value_heads=2 head_dim=128 norm_eps=1e-05
iquestcoder num_attention_heads=40 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
jais2 num_attention_heads=26 norm_eps=1e-05
lara_mini num_attention_heads=16 num_key_value_heads=4 head_dim=128 norm_eps=1e-06
lfm2 num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
llama num_attention_heads=32 norm_eps=1e-06
llama4 num_attention_heads=40 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
llama4_text num_attention_heads=40 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
mellum num_attention_heads=32 num_key_value_heads=4 head_dim=128 norm_eps=1e-06
minimax_m2 num_attention_heads=48 num_key_value_heads=8 head_dim=128 norm_eps=1e-06
ministral num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-06
ministral3 num_attention_heads=32 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
mistral num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-06
mixtral num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
mllama num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
mllama_text_model num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
nemotron num_attention_heads=48 norm_eps=1e-05
olmo num_attention_heads=32
olmo2 num_attention_heads=32 norm_eps=1e-05
olmo3 num_attention_heads=32 norm_eps=1e-05
olmo_hybrid num_attention_heads=30 norm_eps=1e-06
olmoe num_attention_heads=16 norm_eps=1e-05
paddleocr_vl_text num_attention_heads=16 num_key_value_heads=2 head_dim=128 norm_eps=1e-05
persimmon num_attention_heads=64 norm_eps=1e-05
phi num_attention_heads=32 norm_eps=1e-05
phi3 num_attention_heads=32 norm_eps=1e-05
phi4_multimodal num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
phimoe num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-05
qwen2 num_attention_heads=32 num_key_value_heads=32 norm_eps=1e-06
qwen2_5_omni_text num_attention_heads=28 num_key_value_heads=4 norm_eps=1e-06
qwen2_5_vl num_attention_heads=64 num_key_value_heads=8 norm_eps=1e-05
qwen2_5_vl_text num_attention_heads=64 num_key_value_heads=8 norm_eps=1e-05
qwen2_moe num_attention_heads=16 num_key_value_heads=16 norm_eps=1e-06
qwen2_vl num_attention_heads=64 num_key_value_heads=8 norm_eps=1e-05
qwen2_vl_text num_attention_heads=64 num_key_value_heads=8 norm_eps=1e-05
qwen3 num_attention_heads=32 num_key_value_heads=32 head_dim=128 norm_eps=1e-06
qwen3_5_moe_text num_attention_heads=16 num_key_value_heads=2 head_dim=256 norm_eps=1e-06
qwen3_5_text num_attention_heads=16 num_key_value_heads=4 head_dim=256 norm_eps=1e-06
qwen3_moe num_attention_heads=32 num_key_value_heads=4 norm_eps=1e-06
qwen3_next num_attention_heads=16 num_key_value_heads=2 head_dim=256 norm_eps=1e-06
qwen3_omni_moe_text num_attention_heads=28 num_key_value_heads=4 norm_eps=1e-06
qwen3_vl_moe_text num_attention_heads=16 num_key_value_heads=16 norm_eps=1e-06
qwen3_vl_text num_attention_heads=32 num_key_value_heads=32 head_dim=128 norm_eps=1e-06
seed_oss num_attention_heads=80 num_key_value_heads=8 head_dim=128 norm_eps=1e-06
smollm3 num_attention_heads=16 num_key_value_heads=4 norm_eps=1e-06
solar_open num_attention_heads=64 num_key_value_heads=8 head_dim=128 norm_eps=1e-05
stablelm num_attention_heads=32 num_key_value_heads=32 norm_eps=1e-05
starcoder2 num_attention_heads=24 num_key_value_heads=2 norm_eps=1e-05
unlimited_ocr_text num_attention_heads=10 num_key_value_heads=10 norm_eps=1e-06
vaultgemma num_attention_heads=8 num_key_value_heads=4 head_dim=256 query_pre_attn_scalar=256 attn_logit_softcapping=50.0 norm_eps=1e-06
voxtral_realtime_text num_attention_heads=32 num_key_value_heads=8 norm_eps=1e-06
"""
