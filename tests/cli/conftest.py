"""What the tests of several commands share: a text, models on disk, and runs of commands."""

import json

import numpy as np
import pytest
from command_line import TABLE
from safetensors.numpy import save_file

import transformer_embed as te
from transformer_embed._src.pretrained.own import CONFIG, EXTRAS, encoded
from transformer_embed.cli.main import main


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    line = b"line %d of a text, and %d squared is %d\n"
    path.write_bytes(b"".join(line % (n, n, n * n) for n in range(100)))
    return path


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A model as `train --out` writes it, untrained."""
    path = tmp_path_factory.mktemp("model") / "params.safetensors"
    module, name = TABLE.rsplit("/", 1)
    table = np.random.default_rng(0).normal(0, 128**-0.5, (256, 128)).astype(np.float32)
    params = {module: {name: table}, "query": {"w": np.ones((3, 2), np.float32)}}
    te.pretrained.save_embedder(path, te.EmbedderConfig(256, 128, dropout_rate=0.0), params)
    return path


@pytest.fixture
def save_embedder():
    """Saves an embedder under a path, or something that is almost one."""

    def save(path, config, **change):
        shapes = {TABLE: (config.vocab_size, config.d_model)}
        if isinstance(config.scheme, te.Learned):
            positions = "transformer_embedding/~/learned_positional_encoding/embeddings"
            shapes[positions] = (config.scheme.max_len, config.d_model)
        random = np.random.default_rng(0)
        arrays = {name: np.float32(random.normal(size=shape)) for name, shape in shapes.items()}
        text = json.dumps(vars(config), default=encoded)
        names = json.dumps({"names": {name: name for name in shapes}})
        metadata = {CONFIG: change.get("text", text), EXTRAS: names}
        save_file(change.get("arrays", arrays), path, metadata=metadata)
        return path

    return save


@pytest.fixture
def prints(capsys):
    """What a command that works prints on stdout and on stderr."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def fails(capsys):
    """The one line on stderr of a command that must fail."""

    def run(*arguments):
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert captured.err.startswith("transformer-embed: error: ")
        return captured.err

    return run
