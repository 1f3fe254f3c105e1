"""What the tests of several commands share: a text, a model on disk, and runs of commands."""

import re
import sys

import numpy as np
import pytest
from drawn import drawn

import transformer_embed as te
from transformer_embed.cli.main import main


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    line = b"line %d of a text, and %d squared is %d\n"
    path.write_bytes(b"".join(line % (n, n, n * n) for n in range(400)))
    return path


@pytest.fixture(scope="session")
def model_file(tmp_path_factory):
    """A model as `train --out` writes it, untrained."""
    path = tmp_path_factory.mktemp("model") / "params.safetensors"
    config = te.EmbedderConfig(256, 128)
    params = drawn(te.Embedder(config).init) | {"query": {"w": np.ones((3, 2), np.float32)}}
    te.pretrained.save_embedder(path, config, params)
    return path


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
    """What a command that must fail prints on stderr: one line, or the usage before it."""

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            sys.exit(main([str(argument) for argument in arguments]))
        assert stop.value.code == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        last = captured.err.splitlines()[-1]
        assert re.match(r"transformer-embed[a-z ]*: error: ", last)
        assert captured.err.startswith("usage: ") or captured.err.count("\n") == 1
        return last

    return run
