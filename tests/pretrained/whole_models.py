"""Whole models for the sweep: the decoder of notebook 08, and a small encoder.

The tables say what they need to know of a type besides its config.json and what `load_embedder`
returns.
"""

import functools
import json
import pathlib
import re
import types

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

import transformer_embed as te

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "08_a_whole_decoder.ipynb"
# Names of tensors and traits beside those of the notebook's families.
ROLES = {
    r"Wqkv": "query key value",
    r"fc_in": "up",
    r"fc_out|ffn\.down_proj": "down",
    r"norm_1|ln_attn": "norm_before_mix",
    r"norm_2|ln_mlp": "norm_before_mlp",
    r"post_self_attn_layernorm|post_norm1": "norm_after_mix",
    r"post_mlp_layernorm|post_norm2": "norm_after_mlp",
    r"q_layernorm": "query_norm",
    r"k_layernorm": "key_norm",
    r"(?<!\w)(norm_f|layer_norm|final_layernorm)": "norm",
}
TRAITS = {
    "by_head": "falcon persimmon",
    "centered": "mpt cohere2",
    "in_out": "gpt-sw3",
    "one_plus": "gemma vaultgemma gemma3 nemotron",
}
ACTIVATIONS = {
    "relu2": lambda x: jax.nn.relu(x) ** 2,
    "swish": jax.nn.silu,
    "gelu_fast": jax.nn.gelu,
}
# Entries that the decoder asks for and that a type has under another name, or never writes.
ENTRIES = {
    # The library's layer norms have this one, whatever config.json says.
    "biogpt": {"layer_norm_eps": 1e-5},
    "falcon": {"num_key_value_heads": 1, "use_parallel_residual": True, "hidden_act": "gelu"},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {
        "attention_multiplier": 1.0,
        "layer_types": ["full", "sliding_attention", "full"],
        "sliding_window": 4,
    },
    "mpt": {"hidden_act": "gelu"},
}
SIZES = "num_attention_heads num_hidden_layers num_key_value_heads"
EPSILONS = "norm_epsilon norm_eps"
DECODERS = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3 granite smollm3 olmo2 olmo3 glm "
    "glm4 stablelm phi phi3 cohere cohere2 gpt_neox gpt2 opt bloom gptj falcon mpt gpt_neo "
    "gpt_bigcode starcoder2 arcee seed_oss exaone4 ernie4_5 helium nemotron cwm persimmon biogpt "
    "xglm gpt-sw3 hyperclovax internlm3 iquestcoder jais2 ministral3 audioflamingo3 aya_vision "
    "cohere2_vision deepseek_vl deepseek_vl_hybrid exaone4_5 fuyu glmasr got_ocr2 granite_speech "
    "granite_speech_plus hyperclovax_vision_v2 idefics2 idefics3 internvl janus lighton_ocr llava "
    "llava_next llava_next_video llava_onevision mistral3 moss_transcribe_diarize musicflamingo "
    "ovis2 paligemma pp_chart2table qianfan_ocr qwen2_audio qwen3_asr shieldgemma2 smolvlm"
)
ENCODER_ROLES = {
    r"(self\.query|attn\.q|q_lin|q_proj)": "query",
    r"(self\.key|attn\.k|k_lin|k_proj)": "key",
    r"(self\.value|attn\.v|v_lin|v_proj)": "value",
    r"(attention\.output\.dense|attn\.o|out_lin|out_proj)": "mix",
    r"(attention\.output\.LayerNorm|attention\.LayerNorm|sa_layer_norm|self_attn_layer_norm)": (
        "norm_mix"
    ),
    r"(intermediate\.dense|lin1|fc1)": "up",
    r"(output\.dense|lin2|fc2)": "down",
    r"(output\.LayerNorm|output_layer_norm|final_layer_norm)": "norm",
}
ENCODERS = (
    "bert roberta xlm-roberta camembert electra distilbert ernie data2vec-text mpnet splinter luke"
)


@functools.cache
def notebook() -> types.SimpleNamespace:
    """What the cells of the notebook define that hold its tables and its decoder."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict = dict(globals())
    for source in sources:
        if re.search(r"^(ROLES =|def load\(|def decoder\()", source, re.MULTILINE):
            exec(source, names)
    names["ROLES"] = ROLES | names["ROLES"]
    names["ACTIVATIONS"] |= ACTIVATIONS
    names["TRAITS"] |= {name: trait for trait in TRAITS for name in TRAITS[trait].split()}
    return types.SimpleNamespace(**names)


def write_entries(path, model_type, text_config):
    """Adds to a config.json what the decoder asks for and the type calls otherwise."""
    entries = json.loads(path.read_text())
    own = entries.get("text_config", entries)
    for name in SIZES.split():
        if getattr(text_config, name, None) is not None:
            own.setdefault(name, getattr(text_config, name))
    for name in EPSILONS.split():
        if name in own:
            own.setdefault("layer_norm_epsilon", own[name])
    own |= ENTRIES.get(model_type, {})
    path.write_text(json.dumps(entries))


def logits(folder, ids, pad_id):
    """Of a checkpoint's decoder, [batch, length, vocab_size]; positions count the tokens."""
    parts = notebook()
    model = parts.load(folder)
    apply = hk.transform(functools.partial(parts.decoder, model)).apply
    return np.asarray(
        apply(model.params, None, ids, te.TokenPositions.from_ids(ids, pad_id=pad_id))[0]
    )


def hidden(folder, ids, pad_id, token_types):
    """The last hidden vectors of an encoder whose norms follow each sum, as in BERT."""
    found = te.pretrained.load_embedder(folder)
    entries = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    layers = {}
    for name, array in tensors.items():
        number = re.search(r"(?<!\w)layers?\.(\d+)\.", name)
        roles = [ENCODER_ROLES[end] for end in ENCODER_ROLES if re.search(end + r"\.\w+$", name)]
        if number and roles:
            leaf = name.rpartition(".")[2]
            layers.setdefault(int(number[1]), {})[roles[0], leaf] = array.T

    def linear(layer, role, x):
        return x @ layer[role, "weight"] + layer[role, "bias"]

    def norm(layer, role, x):
        x = jax.nn.standardize(x, epsilon=entries.get("layer_norm_eps", 1e-12))
        return x * layer[role, "weight"] + layer[role, "bias"]

    heads = entries.get("num_attention_heads") or entries["n_heads"]
    options = {} if found.config.num_token_types is None else {"token_types": token_types}
    x = te.Embedder(found.config).apply(found.params, None, ids, is_training=False, **options)
    tokens = te.TokenPositions.from_ids(ids, pad_id=pad_id)
    mask, bias = te.AttentionMask(tokens, causal=False).dense(), None
    if found.bias is not None:
        places = jnp.arange(ids.shape[1])
        table = hk.transform(lambda: te.RelativePositionBias(**found.bias)(places, places))
        bias = table.apply(found.params, None)
    for _, layer in sorted(layers.items()):
        split = (
            linear(layer, role, x).reshape(*ids.shape, heads, -1)
            for role in ("query", "key", "value")
        )
        mixed = jax.nn.dot_product_attention(*split, mask=mask, bias=bias).reshape(x.shape)
        x = norm(layer, "norm_mix", x + linear(layer, "mix", mixed))
        up = jax.nn.gelu(linear(layer, "up", x), approximate=False)
        x = norm(layer, "norm", x + linear(layer, "down", up))
    return np.asarray(x)
