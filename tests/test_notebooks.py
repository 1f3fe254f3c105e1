"""Every notebook runs from top to bottom in a fresh kernel of this interpreter, and is stored as such a run left it."""

import importlib.metadata
import json
import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SECONDS_A_CELL = 120
MOST_BYTES = 700_000

by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def execute(tmp_path):
    """Runs a notebook in an empty folder; a cell that raises is a CellExecutionError."""
    pytest.importorskip("ipykernel")
    nbclient = pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    class ThisInterpreter(KernelSpecManager):
        """Whatever kernel a notebook names, and whatever kernels are installed, this interpreter runs it."""

        def get_kernel_spec(self, kernel_name):
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return KernelSpec(argv=argv, display_name=kernel_name, language="python")

    def run(notebook):
        manager = AsyncKernelManager(kernel_spec_manager=ThisInterpreter(), connection_file=str(tmp_path / "kernel.json"))
        resources = {"metadata": {"path": str(tmp_path)}}
        client = nbclient.NotebookClient(notebook, km=manager, timeout=SECONDS_A_CELL, resources=resources)
        return client.execute(env=_environment(tmp_path))

    return run


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """Pictures go into the notebook, IPython's history into the folder; the package comes from the root where it is not installed."""
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "IPYTHONDIR": str(folder / "ipython")}
    try:
        importlib.metadata.distribution("transformer-embed")
    except importlib.metadata.PackageNotFoundError:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return environment


def _read(path: pathlib.Path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


def _outputs(cells, kind: str) -> list:
    return [output for cell in cells for output in cell.get("outputs", ()) if output["output_type"] == kind]


def test_there_are_notebooks():
    assert NOTEBOOKS


@by_notebook
def test_it_runs(path, execute):
    notebook = execute(_read(path))
    streams = _outputs(notebook.cells, "stream")
    assert [stream["text"] for stream in streams if stream["name"] == "stderr"] == []


def test_a_failed_assertion_in_a_cell_is_a_failure(execute):
    nbformat = pytest.importorskip("nbformat")
    from nbclient.exceptions import CellExecutionError

    cells = [nbformat.v4.new_code_cell("import transformer_embed as te\nassert te.padding_mask([0]).all(), 'seen'")]
    with pytest.raises(CellExecutionError, match="AssertionError: seen"):
        execute(nbformat.v4.new_notebook(cells=cells))


@by_notebook
def test_it_is_stored_with_the_outputs_of_one_run(path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("image/png" in output["data"] for output in _outputs(cells, "display_data"))
    assert _outputs(cells, "error") == []
    assert path.stat().st_size < MOST_BYTES


@by_notebook
def test_what_is_stored_names_no_machine(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["metadata"] for cell in cells] == [{}] * len(cells)
    printed = "".join("".join(stream["text"]) for stream in _outputs(cells, "stream"))
    assert not [word for word in ("/home/", "/root/", "/tmp/", "/Users/", "site-packages") if word in printed]
