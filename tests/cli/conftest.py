"""What the tests of several commands share: a text, and runs of commands."""

import re
import shlex

import pytest

from transformer_embed.cli.main import main


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    line = b"line %d of a text, and %d squared is %d\n"
    path.write_bytes(b"".join(line % (n, n, n * n) for n in range(400)))
    return path


@pytest.fixture
def prints(capsys):
    """What a command that works prints on stdout and on stderr."""

    def run(command):
        capsys.readouterr()
        assert main(shlex.split(command)) == 0
        return capsys.readouterr()

    return run


@pytest.fixture
def fails(capsys):
    """What a command that must fail prints on stderr, in one line."""

    def run(command):
        capsys.readouterr()
        try:
            status = main(shlex.split(command))
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert re.match(r"transformer-embed[a-z ]*: error: ", err.splitlines()[-1])
        return err

    return run
