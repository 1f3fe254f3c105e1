"""The command `inspect` on published models and on own ones."""

import json
import pathlib

import haiku as hk
import numpy as np
import pytest
from checkpoints import CASES, load, load_table, save_embedder
from drawn import drawn

import transformer_embed as te
from transformer_embed._src.layers.parameters import leaves_by_path
from transformer_embed.cli.main import main


@pytest.fixture
def inspect(capsys):
    """What the command prints, without errors."""

    def run(*arguments):
        assert main(["inspect", *arguments]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


CALLS = ("apply_rotary", "AttentionMask", "RelativePositionBias", "alibi_bias")
NAMES = dict.fromkeys(["x", "tokens", "positions", "query_positions", "key_positions"])


@pytest.mark.parametrize("name", ["roberta", "t5, its decoder", "gemma3", "bloom", "llama, older"])
def test_findings_are_printed_as_code(inspect, name):
    found, stack = load(name), CASES[name]["stack"]
    out = inspect(".", *(["--stack", stack] if stack else []))
    for parameter, array in leaves_by_path(found.params).items():
        tensor = found.names[parameter]
        assert f"{parameter}\n  float32{list(array.shape)}, from {tensor}\n" in out
    assert "beside the layer" not in out
    code = out.split("layer\n  ")[1].splitlines()[0]
    assert hk.testing.transform_and_run(lambda: eval(code, {"te": te}))().config == found.config
    printed = [line.strip() for line in out.splitlines() if line.strip().startswith(CALLS)]
    calls = {call: lambda *_, call=call, **options: (call, options) for call in CALLS}
    wanted = []
    for layer in {repr(layer): layer for layer in found.layers}.values():
        wanted += [("apply_rotary", layer.rotary), ("AttentionMask", layer.mask)]
    wanted += [("alibi_bias" if name == "bloom" else "RelativePositionBias", found.bias)]
    wanted = [each for each in wanted if each[1] is not None]
    assert [eval(line, {"te": te} | NAMES | calls) for line in printed] == wanted


def test_layers_that_are_not_rotated_are_named(inspect):
    load_table({"model_type": "cohere2", "rope_theta": 70.0})
    assert inspect(".").endswith(
        "sliding_attention, in layers 0, 1, 2, 4, 5\n"
        "  apply_rotary(x, positions, base=70.0, layout='interleaved')\n"
        "  AttentionMask(tokens, causal=True, window=(4095, 0))\n"
        "full_attention, in layers 3\n  AttentionMask(tokens, causal=True)\n"
    )


@pytest.mark.parametrize(
    "options",
    [
        "",
        ", scheme=te.Learned(max_len=8, start=2), scale=2.0, param_dtype='bfloat16'",
        ", scheme=te.SinusoidalGrid(shape=(2, 3), axes=(0, 1)), output=te.OutputConfig(scale=2.0)",
        ", scheme=None, pad_id=0, output=None",
    ],
)
def test_code_has_options_that_differ_from_defaults_and_a_count_of_other_parameters(
    inspect, options
):
    code = f"te.EmbedderConfig(vocab_size=9, d_model=4{options})"
    config = eval(code, {"te": te})
    model = {f"decoder/block_{n}": {"w": np.ones(4, np.float32)} for n in range(3)}
    save_embedder("x", config, drawn(te.Embedder(config).init) | model)
    out = inspect("x")
    assert f"layer\n  te.TransformerEmbedding({code})\n" in out
    assert "block" not in out
    assert out.endswith("beside the layer\n  3 parameters\n")


def test_the_row_of_a_type_is_printed(inspect):
    out = inspect("--model-type", "llama4_text")
    lines = out.splitlines()
    assert lines[0] == "llama4_text"
    assert "  tokens: embed_tokens" in lines
    assert "  kinds: full_attention, chunked_attention" in lines
    assert "  rope_theta (or global_rope_theta, rotary_emb_base): 500000.0" in lines
    assert inspect("--model-type", "mistral4").endswith(
        "entries that change nothing\n  max_position_embeddings partial_rotary_factor\n"
    )


def test_a_config_and_a_part_of_one_are_printed(inspect):
    """Without parameters, and with the reason why there is no output layer."""
    text = {"model_type": "bert", "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 1}
    text |= {"type_vocab_size": 2, "max_position_embeddings": 9}
    pathlib.Path("config.json").write_text(json.dumps({"thinker": {"text": text}}))
    out = inspect("config.json", "--part", "thinker.text")
    assert out.startswith("layer\n  te.TransformerEmbedding(te.EmbedderConfig(vocab_size=12, ")
    assert "\nno output layer\n  a dense layer and a norm come before it\n" in out
