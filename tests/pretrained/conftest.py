"""Each test of published models runs in an empty folder of its own."""

import pytest


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
