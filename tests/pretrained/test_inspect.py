"""The commands `inspect` and `embed` on published models."""

import io
from contextlib import redirect_stderr, redirect_stdout

import haiku as hk
import numpy as np
import pytest
from checkpoints import CASES, load, save_embedder, table
from drawn import drawn

import transformer_embed as te
from transformer_embed._src.layers.parameters import by_path
from transformer_embed.cli.main import main


def run(*arguments):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        status = main([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("roberta", None),
        ("t5, its decoder", "RelativePositionBias(num_heads"),
        ("gemma3", "apply_rotary(x, positions, base"),
        ("bloom", "alibi_bias(query_positions, key_positions, num_heads"),
        ("llama, older", "apply_rotary(x, positions, base"),
    ],
)
def test_inspect_prints_what_is_found(tmp_path, name, start):
    found, stack = load(tmp_path, name), CASES[name]["stack"]
    status, out, err = run("inspect", tmp_path, *(["--stack", stack] if stack else []))
    assert (status, err) == (0, "")
    for parameter, array in by_path(found.params).items():
        tensor = found.names[parameter]
        assert f"{parameter}\n  float32{list(array.shape)}, from {tensor}\n" in out
    assert "beside the layer" not in out
    code = out.split("layer\n  ")[1].splitlines()[0]
    made = hk.testing.transform_and_run(lambda: eval(code, {"te": te}))()
    assert made.config == found.config
    calls = ("apply_rotary", "AttentionMask", "RelativePositionBias", "alibi_bias")
    printed = [line.strip() for line in out.splitlines() if line.strip().startswith(calls)]
    assert all(line.startswith((start or "AttentionMask", "AttentionMask")) for line in printed)
    names = dict.fromkeys(("x", "tokens", "positions", "query_positions", "key_positions"))
    known = {"te": te} | names | dict.fromkeys(calls, lambda *_, **options: options)
    different = {repr(layer): layer for layer in found.layers}.values()
    wanted = [each for layer in different for each in (layer.rotary, layer.mask)]
    wanted = [each for each in [*wanted, found.bias] if each is not None]
    assert [eval(line, known) for line in printed] == wanted


def test_inspect_counts_what_stands_beside_the_layer(tmp_path):
    params = drawn(te.Embedder(te.EmbedderConfig(9, 4)).init)
    params |= {f"decoder/block_{n}": {"w": np.ones(4, np.float32)} for n in range(3)}
    save_embedder(tmp_path / "x.safetensors", te.EmbedderConfig(9, 4), params)
    out = run("inspect", tmp_path / "x.safetensors")[1]
    assert "block" not in out
    assert out.endswith("beside the layer\n  3 parameters\n")


def test_inspect_names_layers_that_are_not_rotated(tmp_path):
    table(tmp_path, {"model_type": "cohere2", "rope_theta": 70.0})
    assert run("inspect", tmp_path)[1].endswith(
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
def test_inspect_prints_code_of_what_is_not_default(tmp_path, options):
    code = f"te.EmbedderConfig(vocab_size=9, d_model=4{options})"
    config = eval(code, {"te": te})
    save_embedder(tmp_path / "x", config, drawn(te.Embedder(config).init))
    assert f"layer\n  te.TransformerEmbedding({code})\n" in run("inspect", tmp_path / "x")[1]
