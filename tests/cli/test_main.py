"""The parser, help, settings and standard streams."""

import subprocess
import sys

import numpy as np
import pytest
from drawn import drawn
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed.cli.main import main

SHAPES = {
    "word_embeddings.weight": (12, 8),
    "position_embeddings.weight": (10, 8),
    "token_type_embeddings.weight": (2, 8),
    "LayerNorm.weight": 8,
    "LayerNorm.bias": 8,
}
FILES = {
    "half.json": '{"layer_norm_eps": 0.5, "model_type": "bert"}',
    "gpt2.json": '{"layer_norm_eps": 0.25, "model_type": "gpt2"}',
    "damaged.json": "{",
    "list.json": "[1]",
    "small.json": '{"model_type": "bert", "vocab_size": 12, "hidden_size": 8}',
}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    """With files of settings, and a checkpoint of BERT without its config.json."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        tmp_path.joinpath(name).write_text(text)
    tensors = {f"embeddings.{name}": np.ones(shape, "f4") for name, shape in SHAPES.items()}
    save_file(tensors, "bert.safetensors")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("fly", "invalid choice: 'fly'"),
        ("train --steps -1", "--steps: wanted an int of at least 1, got -1"),
        ("train --seed 2147483648", "--seed: wanted an int of at most 2147483647, got 2147483648"),
        ("train --step 3", "unrecognized arguments: --step (see transformer-embed --help)"),
        ("train --steps x", "argument --steps: invalid int value: 'x' (see transformer-embed train --help)"),
        ("inspect", "inspect: wanted a CHECKPOINT, or --model-type, got neither"),
        ("inspect --model-type lama", "name: wanted a known model type, such as 'llama', got 'lama'"),
        ("inspect small.json --part x", "part 'x': wanted of small.json, one of [], got 'x'"),
        ("inspect c --stack both", "argument --stack: invalid choice: 'both'"),
        ("inspect bert.safetensors", "model_type: wanted the type of a known model"),
        ("inspect bert.safetensors --model-type bert", "layer_norm_eps"),
        ("inspect bert.safetensors --settings damaged.json", "Expecting property name"),
        ("inspect bert.safetensors --settings list.json", "list.json: wanted a JSON object, got list"),
        ("inspect bert.safetensors --settings missing", "No such file or directory"),
    ],
)  # fmt: skip
def test_wrong_flags_and_files(fails, command, message):
    assert message in fails(command)


def test_settings_are_read_from_a_file_and_model_type_is_added(prints):
    inspect = "inspect bert.safetensors --settings "
    assert "layer_norm_eps=0.5" in prints(f"{inspect}half.json").out
    assert "layer_norm_eps=0.25" in prints(f"{inspect}gpt2.json --model-type bert").out


@pytest.mark.parametrize("command", ["", "train", "inspect"])
def test_help_fits_a_terminal(capsys, monkeypatch, command):
    """tests/test_docs.py compares it with the page of the command line."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: transformer-embed {command}".rstrip())
    assert max(map(len, out.splitlines())) <= 80


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"transformer-embed {te.__version__}\n"


# --- Standard streams, in a process of its own.


@pytest.mark.gate
def test_a_reader_that_exits_first_is_no_error():
    config = te.EmbedderConfig(256, 128)
    te.pretrained.save_embedder("x", config, drawn(te.Embedder(config).init))
    command = f"{sys.executable} -m transformer_embed inspect x | head -c 1"
    done = subprocess.run(["bash", "-c", command], check=True, capture_output=True)
    assert (len(done.stdout), done.stderr) == (1, b"")


@pytest.mark.gate
def test_wrong_flags_and_the_package_load_nothing_slow():
    code = (
        "import sys\nfrom transformer_embed.cli.main import main\nassert main(['inspect', '/missing']) == 2\n"
        "print([name for name in ('optax', 'tqdm', 'safetensors', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    assert done.stderr.count("\n") == 1
