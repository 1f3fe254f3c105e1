"""Peak memory and time of loading a table of 1 GiB: ours, with and without padding rows, and
safetensors.numpy.load_file.

Usage: python tests/benchmarks/pretrained.py [--mib 1024] [--rounds 5]. Writes the
table to a temporary folder; each load is a process of its own, with the file in the page cache.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import markdown_table, parser_of, print_machine
from safetensors.numpy import save_file

WIDTH = 1024
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", "transformer-embed")
LOADS = {
    "ours, load_embedder": "loaded = te.pretrained.load_embedder(path).params",
    "ours, to 8 devices": "loaded = te.pretrained.load_embedder(path, shardings=SPLIT).params",
    "ours, row_multiple=128": "loaded = te.pretrained.load_embedder(path, row_multiple=128).params",
    "ours, row_multiple=128, to 8 devices": (
        "loaded = te.pretrained.load_embedder(path, row_multiple=128, shardings=SPLIT).params"
    ),
    "ours, then jax.device_put to 8 devices": (
        "loaded = jax.device_put(te.pretrained.load_embedder(path).params, ON_MESH)"
    ),
    "safetensors.numpy.load_file": "loaded = safetensors.numpy.load_file(path)",
}
# VmHWM is the peak of resident memory in KiB, the mapped pages of files included; 5 written to
# clear_refs starts it anew.
PROGRAM = """
import json, os, pathlib, sys, time
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, ml_dtypes, safetensors.numpy
import transformer_embed as te

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

ON_MESH = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P("data"))
SPLIT = dict([("token_embedding/embeddings", ON_MESH)])
path = sys.argv[1]
{load}
del loaded
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
path = sys.argv[2]
start = time.perf_counter()
{load}
jax.block_until_ready(loaded)
seconds = time.perf_counter() - start
print(json.dumps(dict(seconds=seconds, peak=status("VmHWM") - before)))
"""


def write_checkpoint(folder, rows):
    table = np.random.default_rng(0).random((rows, WIDTH), np.float32)
    folder.mkdir()
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors", {"format": "pt"})
    settings = {"model_type": "llama", "vocab_size": rows, "hidden_size": WIDTH}
    settings |= {"num_attention_heads": 8, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder / "model.safetensors")


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the table (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5, help="loads a line (default: 5)")
    arguments = parser.parse_args()
    print_machine(PACKAGES, f"{arguments.rounds} rounds, {arguments.mib} MiB")
    size, rows, runs = arguments.mib * 2**20, [], {name: [] for name in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        # A small file is loaded first: what code and compiled programs take is not the table's.
        # Both numbers of rows are no multiples of 128, and the large one is a multiple of 8.
        numbers = {"small": 8, "large": size // (4 * WIDTH) - 8}
        paths = [write_checkpoint(Path(folder, name), count) for name, count in numbers.items()]
        for _, (name, load) in itertools.product(range(arguments.rounds), LOADS.items()):
            command = [sys.executable, "-c", PROGRAM.format(load=load), *paths]
            runs[name].append(json.loads(subprocess.check_output(command)))
    for name, each in runs.items():
        peak = max(run["peak"] for run in each) / size
        seconds = np.median([run["seconds"] for run in each])
        rows.append([name, f"{seconds:.2f}", f"{peak:.2f}"])
    print(markdown_table(["line", "median, s", "peak memory / table"], rows))


if __name__ == "__main__":
    main()
