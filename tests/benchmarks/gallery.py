"""Runs the programs of the gallery beside the same programs in plain Haiku.

Usage: python tests/benchmarks/gallery.py [--only PROGRAM ...] [--seeds N] [--steps N]
                                          [--json FILE] [--draw FILE]

Both programs of a pair train with the same layers, data, optimizer, steps and seeds. Then their
steps are timed in turns. `--json FILE` writes what was measured, and `--draw FILE` draws the
pictures of the page from such a file and prints the table.
"""

import ast
import importlib
import json
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "notebooks" / "gallery"
sys.path[:0] = [str(HERE), str(FOLDER)]

import jax
import layers
import matplotlib.pyplot as plt
import numpy as np
from harness import interleave, markdown_table, parser_of, print_machine
from scipy.ndimage import uniform_filter1d

PROGRAMS = {
    "bert": "masked bytes that are right",
    "vit": "digits that are right",
    "number_words": "numbers that are right",
    "decoder": "nats per byte",
    "recommender": "recall@10",
    "grpo": "reward",
}
OURS, PLAIN = "with the package", "plain Haiku"
ROUNDS, STEPS_PER_ROUND = 7, 5
COLUMNS = ["program", "line", "held out", "ms per step", "temporaries, MB", "lines"]


def modules_of(name):
    """The program with the package, and the plain one."""
    return {OURS: importlib.import_module(name), PLAIN: importlib.import_module(f"{name}_plain")}


def measure(name, seeds, steps):
    """Trains both programs for each seed, then times their steps in turns."""
    modules = modules_of(name)
    batches = modules[OURS].next_batch
    steps = steps or modules[OURS].STEPS
    found = {line: {"curves": [], "held out": []} for line in modules}
    for seed in range(seeds):
        for line, module in modules.items():
            options = {"next_batch": batches, "steps": steps, "seed": seed}
            params, losses, _ = layers.run(*module.setup(steps, seed), **options)
            found[line]["curves"].append(np.round(losses, 4).tolist())
            found[line]["held out"].append(module.held_out(params))
            print(f"{name}, {line}, seed {seed}: {found[line]['held out'][-1]:.4f}", flush=True)
    calls = {}
    for line, module in modules.items():
        step, params, state = module.setup(steps, 0)
        batch = batches(np.random.default_rng(0))
        compiled = step.lower(params, state, jax.random.key(0), batch).compile()
        found[line]["temporaries"] = compiled.memory_analysis().temp_size_in_bytes
        found[line]["lines"] = lines_of(name, line)
        calls[line] = stepping(step, params, state, batch)
    samples = interleave(calls, ROUNDS, name, STEPS_PER_ROUND)
    for line, seconds in samples.items():
        found[line]["milliseconds"] = statistics.median(seconds)
    return found


def lines_of(name, line):
    """Counts the lines of a program that its counterpart does not share, without docstrings."""
    ours, plain = (definitions_of(FOLDER / f"{file}.py") for file in (name, f"{name}_plain"))
    if line == PLAIN:
        return sum(count_lines(node) for node in plain.values())
    # What the plain program imports, and what these definitions need that it does not replace.
    needed = imported_names(FOLDER / f"{name}_plain.py", name)
    shared = set()
    while needed:
        shared |= needed
        used = {each.id for each in walk(ours[name] for name in needed if name in ours)}
        needed = (used & ours.keys()) - shared - plain.keys()
    return sum(count_lines(node) for name, node in ours.items() if name not in shared)


def definitions_of(path):
    """The functions and values that a file defines, by name."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
            names = [each.id for each in targets if isinstance(each.ctx, ast.Store)]
            found |= dict.fromkeys(names[:1], node)
            # Several names on one line are one line.
            found |= dict.fromkeys(names[1:], ast.Module([], []))
    return found


def imported_names(path, module):
    """What a file imports from a module, by name or as an attribute."""
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == module]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    names = {alias.name for node in imports for alias in node.names}
    return names | {each.attr for each in attributes if ast.unparse(each.value) == module}


def walk(nodes):
    """All names that occur in these definitions."""
    return [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)]


def count_lines(node):
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
        node.body = node.body[1:]
    return len(ast.unparse(node).splitlines())


def stepping(step, params, state, batch):
    """One step after another, each from the result of the last one."""
    held, rng = [params, state], jax.random.key(0)

    def call():
        *held[:], loss = step(*held, rng, batch)
        return loss

    return call


def table_of(found):
    rows = []
    for name, lines in found.items():
        for line, facts in lines.items():
            results = facts["held out"]
            cells = [f"{statistics.mean(results):.3f} ({min(results):.3f} to {max(results):.3f})"]
            cells += [f"{facts['milliseconds']:.1f}", f"{facts['temporaries'] / 1e6:.1f}"]
            rows.append([f"`{name}`: {PROGRAMS[name]}" if line == OURS else "", line, *cells])
            rows[-1].append(str(facts["lines"]))
    return markdown_table(COLUMNS, rows)


def draw(found):
    """One picture for each program: the mean of the curves of both, and each seed's."""
    for name, lines in found.items():
        figure, axes = plt.subplots(figsize=(5.2, 3.2), constrained_layout=True)
        for color, (line, facts) in zip(("tab:blue", "tab:orange"), lines.items(), strict=True):
            curves = np.array(facts["curves"])
            smooth = uniform_filter1d(curves, max(curves.shape[1] // 40, 1), axis=1)
            axes.plot(smooth.T, color=color, alpha=0.25, linewidth=0.8)
            axes.plot(smooth.mean(axis=0), color=color, label=line)
        axes.set_xlabel("training step")
        axes.set_ylabel("missing reward" if name == "grpo" else "training loss")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(FOLDER.parent / "pictures" / f"gallery_{name}.png", dpi=110)
        plt.close(figure)


def main():
    """Prints a Markdown table."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, metavar="PROGRAM")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path)
    arguments = parser.parse_args()
    if arguments.draw:
        found = json.loads(arguments.draw.read_text())
        draw(found)
        print(table_of(found))
        return
    print_machine(("jax", "jaxlib", "dm-haiku", "optax"), "the gallery")
    found = {}
    for name in arguments.only or PROGRAMS:
        found[name] = measure(name, arguments.seeds, arguments.steps)
        if arguments.json:
            arguments.json.write_text(json.dumps(found))
    print(table_of(found))


if __name__ == "__main__":
    main()
