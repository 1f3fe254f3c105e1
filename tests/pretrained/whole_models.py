"""Whole models for the sweep: the decoder of notebook 08, and a small encoder.

The tables say what they need to know of a type besides its config.json and what `load_embedder`
returns.
"""

import collections
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
    # Read by `experts_of` and `attend_with_sinks`.
    r"experts(\.\d+)?\.\w+|experts|\w+\.(gate|router)|self_attn(?=\.sinks)": None,
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
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gpt_oss": lambda x: jnp.minimum(x, 7) * jax.nn.sigmoid(1.702 * jnp.minimum(x, 7)),
}
# Entries that the decoder asks for and that a type has under another name, or never writes.
ENTRIES = {
    # The library's layer norms have this one, whatever config.json says.
    "biogpt": {"layer_norm_eps": 1e-5},
    "falcon": {"num_key_value_heads": 1, "use_parallel_residual": True, "hidden_act": "gelu"},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {
        "attention_multiplier": 1.0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 4,
    },
    "mpt": {"hidden_act": "gelu"},
}
EXPERT = r"layers\.(?P<layer>\d+)\.\w+\.experts\.\d+\.(?P<role>\w+)\.weight$"
EXPERT_ROLES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up"}
EXPERT_ROLES |= {"w2": "down", "down_proj": "down"}
FUSED = r"layers\.(?P<layer>\d+)\.mlp\.experts\.(?P<roles>gate_up|down)_proj(_bias)?$"
ROUTER = r"layers\.(?P<layer>\d+)\.\w+\.(gate|router)\.(?P<leaf>weight|bias)$"
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
    "ovis2 paligemma pp_chart2table qianfan_ocr qwen2_audio qwen3_asr shieldgemma2 smolvlm "
    "qwen2_vl qwen2_5_vl qwen3_vl mixtral qwen3_moe olmoe gpt_oss granite_swa gemma4 gemma4_text"
)
# Of a layer's tensors in `stack`.
STACK_ROLES = {
    r"experts\.\d+\.\w+": None,
    r"Wqkv|qkv_proj": "query key value",
    r"(self|attention)\.query|(attn|Attention)\.q|q_lin|q_proj": "query",
    r"(self|attention)\.key|(attn|Attention)\.k|k_lin|k_proj": "key",
    r"(self|attention)\.value|(attn|Attention)\.v|v_lin|v_proj": "value",
    r"attention\.(output\.)?dense|(attn|Attention)\.W?o|out_lin|out_proj|o_proj": "mix",
    r"decoder\S+layer\.1\.layer_norm|encoder_attn_layer_norm": "norm_cross",
    r"layer\.0\.layer_norm|attention\.(output\.)?LayerNorm|(sa|self_attn)_layer_norm|attn_norm|"
    r"norm1|post_attention_layernorm|layernorm_before|attn_ln": "norm_mix",
    r"Wi": "gate up",
    r"up_gate_proj": "up gate",
    r"wi_0|fc12|gate_proj": "gate",
    r"intermediate\.dense|lin1|fc11?|ffn|wi(_1)?|up_proj": "up",
    r"output\.dense|lin2|fc2|ffn_output|[wW]o|down_proj": "down",
    r"output\.LayerNorm|(output|final|full_layer)_layer_norm|layer\.[12]\.layer_norm|norm2|mlp_norm|"
    r"post_mlp_layernorm|layernorm_after|mlp_ln": "norm_mlp",
}
CAUSAL = "clip clip_text_model clipseg_text_model groupvit_text_model metaclip_2_text_model"
CAUSAL += " owlv2_text_model owlvit_text_model xclip_text_model"
ENCODERS = (
    "bert roberta xlm-roberta camembert electra distilbert ernie data2vec-text mpnet splinter luke "
    "albert modernbert nomic_bert gte siglip siglip_text_model siglip2_text_model align_text_model "
    "altclip_text_model chinese_clip_text_model flava_text_model bridgetower_text_model "
    f"clap_text_model visual_bert {CAUSAL}"
)
STACKS = (
    "t5 mt5 bart mbart mvp plbart marian pegasus m2m_100 blenderbot fsmt whisper speech_to_text"
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


def load(folder, stack=None, length=24):
    """What `load_embedder` returns; a type with one stack is asked for no other."""
    try:
        return te.pretrained.load_embedder(folder, stack=stack, length=int(length))
    except ValueError as error:
        if "stack: wanted None" not in str(error):
            raise
    return te.pretrained.load_embedder(folder, length=int(length))


def logits(folder, ids, pad_id):
    """Of a checkpoint's decoder, [batch, length, vocab_size]; positions count the tokens."""
    parts = notebook()
    model = parts.load(folder, ids.shape[1])
    # For text, the three positions of a token are equal.
    model.rotary = [
        options and {key: value for key, value in options.items() if key != "pair_axes"}
        for options in model.rotary
    ]
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    options = {}
    if sinks := [tensors[name] for name in sorted(tensors) if name.endswith(".sinks")]:
        options["attend"] = functools.partial(attend_with_sinks, iter(sinks))
    apply = hk.transform(functools.partial(parts.decoder, model, **options)).apply
    tokens = te.TokenPositions.from_ids(ids, pad_id=pad_id)
    with hk.intercept_methods(routed(model, folder)):
        return np.asarray(apply(model.params, None, ids, tokens)[0])


def experts_of(tensors):
    """The experts of each layer side by side, its router, and what experts add to their sums.

    gpt-oss has the experts of a layer in one tensor, its gates between what they multiply.
    """
    blocks, routers = collections.defaultdict(list), collections.defaultdict(dict)
    for name, array in sorted(tensors.items()):
        if found := re.search(EXPERT, name):
            blocks[found["layer"], EXPERT_ROLES[found["role"]], "w"].append(array.T)
        elif found := re.search(FUSED, name):
            parts = {"gate": array[..., ::2], "up": array[..., 1::2]}
            for role in found["roles"].split("_"):
                blocks[found["layer"], role, "wb"["bias" in name]] += [*parts.get(role, array)]
        elif found := re.search(ROUTER, name):
            routers[found["layer"]][found["leaf"]] = array.T
    layers, offsets = collections.defaultdict(dict), {}
    for (number, role, leaf), arrays in blocks.items():
        if (role, leaf) == ("down", "b"):
            offsets[number] = np.stack(arrays)
        else:
            layers[number, role][leaf] = np.concatenate(arrays, 0 if role == "down" else -1)
    return layers, routers, offsets


def routed(model, folder):
    """An interceptor: what experts get up to is times the router's weights."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    entries = json.loads((folder / "config.json").read_text())
    entries = entries.get("text_config", entries)
    layers, routers, offsets = experts_of(tensors)
    for (number, role), leaves in layers.items():
        model.layers[int(number)][role] = model.params[f"layer_{number}/{role}"] = leaves
    if "swiglu_limit" in entries:
        model.activation = ACTIVATIONS["gpt_oss"]
    shares = {}

    def share(number, x):
        logits = x @ routers[number]["weight"] + routers[number].get("bias", 0)
        weights = jax.nn.softmax(logits)
        least = jax.lax.top_k(weights, entries["num_experts_per_tok"])[0][..., -1:]
        weights = jnp.where(weights >= least, weights, 0)
        if entries.get("norm_topk_prob", True):
            weights /= weights.sum(-1, keepdims=True)
        shares[number] = weights

    def call(function, args, options, context):
        y = function(*args, **options)
        place = f"{context.module.module_name}.{context.method_name}"
        found = re.search(r"layer_(\d+)/(up|down).__call__$", place)
        if found is None or found[1] not in routers:
            return y
        number, role = found.groups()
        if role == "down":
            return y + shares[number] @ offsets[number] if offsets else y
        share(number, args[0])
        if "swiglu_limit" in entries:
            y = jnp.clip(y, -entries["swiglu_limit"], entries["swiglu_limit"]) + 1
        return y * jnp.repeat(shares[number], y.shape[-1] // shares[number].shape[-1], axis=-1)

    return call


def attend_with_sinks(sinks, rule, query, key, value, *, scale, softcap, bias):
    """Attention that may also attend to nothing: each head of each layer has a logit for that."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = scale * jnp.einsum("bthd,bshd->bhts", query, key) + te.mask_to_bias(rule.dense())
    sink = jnp.broadcast_to(next(sinks)[:, None, None], (*logits.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([logits, sink], -1))[..., :-1]
    return jnp.einsum("bhts,bshd->bthd", weights, value)


def read_stack(folder, side):
    """The input layer of an encoder or decoder, the tensors of its other layers, and its traits."""
    found = load(folder, side)
    entries = json.loads((folder / "config.json").read_text())
    entries = entries.get("text_config", entries)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    table = found.names["transformer_embedding/~/token_embedding/embeddings"]
    start = rf"(.*\.)?{side}\." if side else re.escape(table.partition("embed")[0])
    layers, last = {}, {}
    for name, array in tensors.items():
        inside, leaf = re.match(start, name), name.rpartition(".")[2]
        if not inside or name in found.names.values():
            continue
        if re.fullmatch(r"(final_|post_)?(layer_?)?norm\.\w+", name[inside.end() :]):
            last[leaf] = array
        number = re.search(r"(?:layers?|block)\.(\d+)\.", name)
        role = next((STACK_ROLES[end] for end in STACK_ROLES if is_at_end(end, name)), None)
        if number is None or role is None:
            continue
        layer = layers.setdefault(int(number[1]), {})
        cross = "cross_" * ("encoder_attn." in name or "EncDec" in name)
        for part, block in zip(role.split(), np.split(array.T, len(role.split()), -1), strict=True):
            layer.setdefault(cross + part, {})[leaf] = block

    def said(names, default=None):
        values = [entries.get(name) for name in names.split()]
        return next((value for value in values if value is not None), default)

    eps = 1e-12 if entries["model_type"] == "distilbert" else 1e-5
    activation = "hidden_act hidden_activation activation_function activation dense_act_fn"
    return types.SimpleNamespace(
        found=found,
        # ALBERT has one layer, and uses it again.
        layers=[layers[number % len(layers)] for number in range(len(found.layers))],
        last=last,
        is_t5="dense_act_fn" in entries,
        heads=said(f"{side}_attention_heads num_attention_heads n_heads num_heads"),
        eps=said("layer_norm_eps layer_norm_epsilon norm_eps", eps),
        activation=notebook().ACTIVATIONS[said(activation)],
    )


def bias_of(found, positions):
    """Of T5 or MPNet, [heads, length, length]; None: it has none."""
    if found.bias is None:
        return None
    bias = hk.transform(lambda: te.RelativePositionBias(**found.bias)(positions, positions))
    return bias.apply(found.params, None)


def hidden(folder, ids, pad_id, *, side=None, memory=None, token_types=None):
    """The last hidden states of an encoder, or of a decoder that reads those of an encoder.

    Norms come before attention and the MLP if there is one more at the end; else after their sums.
    `memory` is [batch, length, width] and its mask.
    """
    model = read_stack(folder, side)
    found, tokens = model.found, te.TokenPositions.from_ids(ids, pad_id=pad_id)
    places = jnp.arange(ids.shape[1])

    def linear(role, x):
        return x @ layer[role]["weight"] + layer[role].get("bias", 0)

    def norm(leaves, x):
        if leaves and model.is_t5:
            x *= jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + model.eps)
        elif leaves:
            x = jax.nn.standardize(x, epsilon=model.eps)
        return x * leaves.get("weight", 1) + leaves.get("bias", 0)

    def attend(x, source, mask, *, cross="", bias=None, rotary=None):
        split = {}
        for role, given in {"query": x, "key": source, "value": source}.items():
            split[role] = linear(cross + role, given).reshape(*given.shape[:2], model.heads, -1)
            if rotary is not None and role != "value":
                split[role] = te.apply_rotary(split[role], places, **rotary)
        options = {"mask": mask, "bias": bias, "scale": 1.0 if model.is_t5 else None}
        mixed = jax.nn.dot_product_attention(**split, **options)
        return linear(cross + "mix", mixed.reshape(*ids.shape, -1))

    def mlp(x):
        up = linear("up", x)
        if "gate" in layer:
            return linear("down", model.activation(linear("gate", x)) * up)
        return linear("down", model.activation(up))

    options = {} if found.config.num_token_types is None else {"token_types": token_types}
    x = te.Embedder(found.config).apply(found.params, None, ids, is_training=False, **options)
    bias = bias_of(found, places)
    for layer, kind in zip(model.layers, found.layers, strict=True):
        mask = te.AttentionMask(tokens, **kind.mask).dense()
        given = functools.partial(attend, mask=mask, bias=bias, rotary=kind.rotary)
        parts = {"norm_mix": lambda x, given=given: given(x, x)}
        if memory is not None:
            parts["norm_cross"] = lambda x: attend(x, *memory, cross="cross_")
        for role, part in (parts | {"norm_mlp": mlp}).items():
            # The first layer of ModernBERT has none before attention.
            leaves = layer.get(role, {})
            x = x + part(norm(leaves, x)) if model.last else norm(leaves, x + part(x))
    return np.asarray(norm(model.last, x))


def is_at_end(pattern, name):
    """Whether a tensor's module ends so."""
    return re.search(rf"({pattern})\.\w+$", name)


def of_stacks(folder, ids, pad_id, memory=None):
    """Logits of a decoder over an encoder that has the same ids, or over what another one gave."""
    mask = None
    if memory is None:
        memory = hidden(folder, ids, pad_id, side="encoder")
        mask = (ids != pad_id)[:, None, None]
    states = hidden(folder, ids, pad_id, side="decoder", memory=(memory, mask))
    found = load(folder, "decoder")
    return np.asarray(te.linear_logits(states, te.Embedder(found.config).output(found.params)))
