"""Peak memory and time of loading a table of 1 GiB: ours, and safetensors.numpy.load_file.

Usage: python tests/benchmarks/pretrained.py [--mib 1024] [--rounds 5] [--dtype float32] Writes the
table to a temporary folder; each load is a process of its own, with the file in the page cache.

With --precision instead: how far embeddings in float32 are from those of the transformers library,
in units in the last place of the largest value. The models are those of
tests/golden/make_pretrained.py, at the sizes SIZES. Needs torch and transformers too.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import environment, markdown_table
from safetensors.numpy import save_file
from tqdm import tqdm

from transformer_embed._src.pretrained import files as _files

WIDTH = 1024
SMALL, LARGE = "small", "large"
BOUND = 1.05
PACKAGES = ("jax", "jaxlib", "numpy", "safetensors", "transformer-embed")
LOADS = {
    "ours, load_embedder": "loaded = te.pretrained.load_embedder(path).params",
    "safetensors.numpy.load_file": "loaded = safetensors.numpy.load_file(path)",
    "load_file, then jnp.asarray": "loaded = jax.tree.map(jnp.asarray, safetensors.numpy.load_file(path))",
}
# A small file is loaded first: what code and compiled programs take is not the table's. VmHWM is
# the peak of resident memory in KiB, the mapped pages of files included; 5 written to clear_refs
# starts it anew.
PROGRAM = """
import json, pathlib, sys, time
import jax, jax.numpy as jnp, ml_dtypes, safetensors.numpy
import transformer_embed as te

def status(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

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
print(json.dumps(dict(seconds=seconds, peak=status("VmHWM") - before, kept=status("VmRSS") - before)))
"""


def write_checkpoint(folder: Path, rows: int, dtype: str) -> Path:
    table = np.random.default_rng(0).random((rows, WIDTH), np.float32).astype(_files.DTYPES[dtype])
    folder.mkdir()
    save_file({"model.embed_tokens.weight": table}, folder / "model.safetensors", {"format": "pt"})
    settings = {
        "model_type": "llama",
        "vocab_size": rows,
        "hidden_size": WIDTH,
        "num_attention_heads": 8,
        "rope_theta": 10_000.0,
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return folder / "model.safetensors"


def measure(load: str, *paths: Path) -> dict[str, float]:
    command = [sys.executable, "-c", PROGRAM.format(load=load), *map(str, paths)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


SIZES = {
    "vocab_size": 1000,
    "decoder_vocab_size": 1000,
    "hidden_size": 768,
    "d_model": 768,
    "dim": 768,
    "n_embd": 768,
    "word_embed_proj_dim": 768,
    "embedding_size": 128,
    "max_position_embeddings": 514,
    "n_positions": 514,
}


def print_precision():
    """Prints a Markdown table with a line for each float32 case of make_pretrained.py."""
    tests = Path(__file__).parents[1]
    sys.path += [str(tests / "golden"), str(tests / "pretrained")]
    import make_pretrained  # noqa: PLC0415 (needs torch)
    import torch  # noqa: PLC0415
    from checkpoints import checkpoint, unpack  # noqa: PLC0415

    import transformer_embed as te  # noqa: PLC0415

    ids = np.random.default_rng(0).integers(3, SIZES["vocab_size"], (2, 500))
    make_pretrained.IDS = ids.tolist()
    rows, seen = [], set()
    for name, kind, arguments, where, options in tqdm(make_pretrained.CASES, leave=False):
        # The form of its config.json does not change a model.
        model = kind, options.get("stack")
        if "dtype" in options or "text_config" in arguments or model in seen:
            continue
        seen.add(model)
        sizes = {key: SIZES[key] for key in arguments if key in SIZES}
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            case = make_pretrained.case_of(name, kind, arguments | sizes, where, options)
            found = te.pretrained.load_embedder(checkpoint(Path(folder), case), stack=case["stack"])
        types = {key: case[key] for key in ("token_types",) if key in case}
        ours = te.Embedder(found.config).apply(found.params, None, ids, is_training=False, **types)
        theirs = unpack(case["embeddings"])
        unit = np.spacing(np.abs(theirs).max())
        rows.append([name, f"{np.abs(ours - theirs).max() / unit:.1f}"])
    print(markdown_table(["model", "largest difference, ulp of the largest value"], rows))


def main():
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the table (default: 1024)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="loads a line, alternating (default: 5)"
    )
    parser.add_argument(
        "--dtype", choices=_files.DTYPES, default="F32", help="of the table (default: F32)"
    )
    parser.add_argument(
        "--precision", action="store_true", help="compare embeddings with transformers instead"
    )
    arguments = parser.parse_args()
    if arguments.precision:
        print_precision()
        return
    item = _files.DTYPES[arguments.dtype].itemsize
    folder = Path(tempfile.mkdtemp())
    try:
        size = arguments.mib * 2**20
        small, large = (
            write_checkpoint(folder / name, rows, arguments.dtype)
            for name, rows in ((SMALL, 8), (LARGE, size // (WIDTH * item)))
        )
        runs = {name: [] for name in LOADS}
        for _ in tqdm(range(arguments.rounds), leave=False):
            for name, load in LOADS.items():
                runs[name].append(measure(load, small, large))
    finally:
        shutil.rmtree(folder)
    machine = environment(PACKAGES)
    print(
        f"{machine['cpus']} CPUs, {machine['platform']}, jax on {machine['backend']}, {arguments.rounds} rounds, {arguments.mib} MiB\n"
    )
    print(", ".join(f"{name} {version}" for name, version in machine["versions"].items()) + "\n")
    rows = [
        [
            name,
            f"{np.median([run['seconds'] for run in each]):.2f}",
            f"{max(run['peak'] for run in each) / size:.2f}",
            f"{max(run['kept'] for run in each) / size:.2f}",
        ]
        for name, each in runs.items()
    ]
    print(markdown_table(["line", "median, s", "peak memory / table", "kept / table"], rows))
    ours = float(rows[0][2])
    print(
        f"\npeak memory at most {BOUND} x the table: {'yes' if ours <= BOUND else 'NO'} ({ours:.2f})"
    )


if __name__ == "__main__":
    main()
