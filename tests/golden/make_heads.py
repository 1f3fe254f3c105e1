"""Writes heads.json: output layers of small models of the transformers library, drawn from seed 0,
with the logits that they give from hidden states.

Run: python tests/golden/make_heads.py
Needs: torch (a CPU build), transformers, safetensors.
"""

import copy
import json
import pathlib
import re
import tempfile

import torch
import transformers
from make_pretrained import BERT, IDS, LLAMA, NEOX, PAD, SEQ2SEQ, T5, pack, versions, write
from safetensors.torch import load_file

GPT2 = {"vocab_size": 12, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 10}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 2}
GPTJ = GPT2 | {"rotary_dim": 4}
ODD = {"logits_scaling": 0.3, "embedding_multiplier": 1.7}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
SMALL = LLAMA | {"hidden_size": 8, "intermediate_size": 8}
XLM = {"vocab_size": 12, "emb_dim": 8, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 10}

# Name, class of the model, arguments of its config.
CASES = [
    ("llama", "LlamaForCausalLM", SMALL | UNTIED),
    ("qwen2, tied", "Qwen2ForCausalLM", SMALL | TIED),
    ("phi", "PhiForCausalLM", SMALL),
    ("gptj", "GPTJForCausalLM", GPTJ),
    ("codegen", "CodeGenForCausalLM", GPTJ | {"n_head": 4, "n_embd": 16, "rotary_dim": 2}),
    ("gpt_neox", "GPTNeoXForCausalLM", NEOX | {"hidden_size": 16}),
    ("gemma2", "Gemma2ForCausalLM", SMALL | {"head_dim": 4, "final_logit_softcapping": 0.75}),
    ("cohere", "CohereForCausalLM", SMALL | {"logit_scale": 0.3}),
    ("cohere2, untied", "Cohere2ForCausalLM", SMALL | UNTIED | {"logit_scale": 0.3}),
    ("granite", "GraniteForCausalLM", SMALL | ODD | UNTIED),
    ("granite, tied", "GraniteForCausalLM", SMALL | ODD | TIED),
    ("hyperclovax", "HyperCLOVAXForCausalLM", SMALL | ODD | UNTIED),
    ("t5", "T5ForConditionalGeneration", T5),
    ("t5, untied", "T5ForConditionalGeneration", T5 | UNTIED),
    ("bart", "BartForConditionalGeneration", SEQ2SEQ),
    ("marian, untied", "MarianMTModel", SEQ2SEQ | UNTIED),
    ("mbart", "MBartForConditionalGeneration", SEQ2SEQ),
    ("ctrl", "CTRLLMHeadModel", GPT2 | {"dff": 8}),
    ("xlm", "XLMWithLMHeadModel", XLM | {"pad_token_id": PAD}),
    ("bert-generation", "BertGenerationDecoder", BERT | {"is_decoder": True}),
    ("opt", "OPTForCausalLM", {"vocab_size": 12, "hidden_size": 8, "ffn_dim": 8, "num_hidden_layers": 1,
     "num_attention_heads": 2, "max_position_embeddings": 10, "word_embed_proj_dim": 8, "pad_token_id": PAD}),
    ("biogpt, untied", "BioGptForCausalLM", SMALL | UNTIED | {"num_key_value_heads": None}),
]  # fmt: skip


def case_of(name, kind, arguments):
    torch.manual_seed(0)
    model_class = getattr(transformers, kind)
    model = model_class(model_class.config_class(**copy.deepcopy(arguments))).eval()
    own = model.get_output_embeddings()
    if name == "t5, untied":
        # The library ties T5 unless the file has both tables.
        own.weight = torch.nn.Parameter(torch.randn_like(own.weight))
    biases = [value for key, value in model.named_buffers() if key == "final_logits_bias"]
    for value in [*model.parameters(), *biases]:
        if value.requires_grad or value.ndim == 2:
            value.data += 0.1 * torch.randn_like(value)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = load_file(f"{folder}/model.safetensors")
        settings = json.loads(pathlib.Path(folder, "config.json").read_text())
    unused = ("architectures", "dtype", "transformers_version", "id2label", "label2id")
    states = []

    def after(_, args, output):
        if getattr(output, "last_hidden_state", None) is not None:
            states.append(output.last_hidden_state)

    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.register_forward_hook(after)
    ids = torch.tensor(IDS)
    inputs = {"input_ids": ids} | (
        {"decoder_input_ids": ids}
        if "decoder" in str(settings) and model.config.is_encoder_decoder
        else {}
    )
    logits = model(**inputs).logits
    return {
        "name": name,
        "settings": {key: value for key, value in settings.items() if key not in unused},
        "stack": "decoder" if model.config.is_encoder_decoder else None,
        "tensors": {
            key: pack(value)
            for key, value in tensors.items()
            if "relative" in key or not re.search(r"\.\d+\.", key)
        },
        "states": pack(states[-1]),
        "logits": pack(logits),
    }


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    with torch.no_grad():
        write("heads.json", {"made": versions(), "cases": [case_of(*case) for case in CASES]})
