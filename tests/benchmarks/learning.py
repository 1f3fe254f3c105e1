"""How well small models learn from different starts, that is, tables drawn at different sizes.

Each row is a kind of config, each column a start: the score at the best of the rates, a mean over
seeds, and the first loss in parentheses. The score is the loss on held-out text, or on new rows of
the tasks that are drawn: `copy` (the token three places back) and `masked` (masked tokens of two
arithmetic progressions a row, in a model like BERT). `post_norm` is a model of six layers with a
norm after each residual sum, on `bytes`. All runs of a width are one program, since what differs
between them is an array.

Usage: python tests/benchmarks/learning.py [--tasks text copy] [--widths 64 256] [--json FILE]
       python tests/benchmarks/learning.py --draw FILE... draws the picture of the page Performance
`text` needs `pip install tokenizers`; `nnx.Embed` needs Flax. A GPU runs all tasks in some minutes. A
CPU takes too long for whole runs: try `--steps 20 --seeds 1`.
"""

import functools
import itertools
import json
import math
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from harness import markdown_table, parser_of
from matplotlib.figure import Figure

import transformer_embed as te

HEAD_DIM = 64
HELD_OUT_BATCHES = 16
PICTURE = Path(__file__).parents[2] / "notebooks" / "pictures" / "starts.png"
SCALED = "sqrt_d_model"


class Task(NamedTuple):
    """What is learned, and by which model."""

    steps: int
    vocab_size: int
    length: int
    batch_size: int
    schemes: tuple[str, ...]
    is_bert: bool = False
    warmup: int = 0
    num_layers: int = 2
    is_post_norm: bool = False
    # Whether the output layer is tied, and the scale of the rows.
    kinds: tuple[tuple[bool, Any], ...] = (
        (True, SCALED),
        (True, 1.0),
        (False, SCALED),
        (False, 1.0),
    )


POST_NORM = {"num_layers": 6, "is_post_norm": True, "kinds": ((True, SCALED),)}
TASKS = {
    "text": Task(300, 4096, 128, 16, ("rotary", "sinusoidal", "learned")),
    "bytes": Task(300, 256, 128, 16, ("rotary", "sinusoidal")),
    "post_norm": Task(300, 256, 64, 16, ("sinusoidal",), **POST_NORM),
    "copy": Task(400, 64, 32, 32, ("sinusoidal", "learned")),
    "masked": Task(600, 41, 32, 32, ("learned",), is_bert=True),
}


class Run(NamedTuple):
    """What differs between the runs of a program; each an array. The first are the standard deviations
    of a start: of tokens, positions and types, the output layer."""

    tokens: Any
    added: Any
    output: Any
    multiplier: Any
    rate: Any
    seed: Any


def starts_of(task, width, scheme, tied, scale):
    """What the tables' rows are multiplied by, and the standard deviations of each start."""
    from flax import nnx  # noqa: PLC0415

    schemes = {"learned": te.Learned(max_len=task.length), "sinusoidal": te.Sinusoidal()}
    options = {"scale": scale, "output": te.OutputConfig(tied=tied)}
    if task.is_bert:
        options |= {"num_token_types": 2, "layer_norm_eps": 1e-6}
    config = te.EmbedderConfig(task.vocab_size, width, schemes.get(scheme), **options)
    ours, unit = config.stddevs, width**-0.5
    flax = nnx.Embed(task.vocab_size, width, rngs=nnx.Rngs(0)).embedding[...]
    embed = hk.transform(lambda: hk.Embed(task.vocab_size, width).embeddings)
    (haiku,) = jax.tree.leaves(embed.init(jax.random.key(0)))
    flax, haiku = float(np.std(flax)), float(np.std(haiku))
    return config.factor, {
        "this package": ours,
        "tokens / 2": (ours.tokens / 2, ours.added / 2, ours.output),
        "tokens * 2": (ours.tokens * 2, ours.added * 2, ours.output),
        "tokens of size 1": (1 / config.factor, 0.02, unit),
        "0.02 (transformers)": (0.02, 0.02, 0.02),
        "`nnx.Embed`": (flax, flax, flax),
        "`hk.Embed`": (haiku, haiku, unit),
    }


def draw(task, width, run):
    """The parameters, those of the layers alike for all starts of a seed."""
    keys = iter(jax.random.split(jax.random.key(run.seed), 4 + 4 * task.num_layers))
    normal = lambda stddev, *shape: stddev * jax.random.normal(next(keys), shape)
    unit, depth = width**-0.5, math.sqrt(2 * task.num_layers)
    params = {
        "tokens": normal(run.tokens, task.vocab_size, width),
        "output": normal(run.output, task.vocab_size, width),
        "positions": normal(run.added, task.length, width),
        "types": normal(run.added, 2, width),
        "norms": jnp.ones([2 * task.num_layers + 2, width]),
        "layers": [],
    }
    for _ in range(task.num_layers):
        layer = {
            "heads": normal(unit, width, 3 * width),
            "out": normal(unit / depth, width, width),
            "up": normal(unit, width, 4 * width),
            "down": normal(unit / 2 / depth, 4 * width, width),
        }
        params["layers"].append(layer)
    return params


def norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain


def hidden(task, scheme, params, run, ids):
    """A Transformer's hidden states: causal, or BERT's with a norm on its embeddings."""
    norms = iter(params["norms"])
    width, positions = params["tokens"].shape[1], jnp.arange(ids.shape[1])
    x = run.multiplier * params["tokens"][ids]
    if scheme == "sinusoidal":
        x += te.sinusoidal_encoding(positions, width)
    if scheme == "learned":
        x += params["positions"]
    first = next(norms)
    if task.is_bert:
        x = norm(x + params["types"][positions // (task.length // 2)], first)
    for layer in params["layers"]:
        before, after = next(norms), next(norms)
        y = x if task.is_post_norm else norm(x, before)
        heads = (y @ layer["heads"]).reshape(*ids.shape, -1, min(HEAD_DIM, width // 2))
        query, key, value = jnp.split(heads, 3, axis=2)
        if scheme == "rotary":
            query, key = te.apply_rotary(query, positions), te.apply_rotary(key, positions)
        y = jax.nn.dot_product_attention(query, key, value, is_causal=not task.is_bert)
        x = x + y.reshape(x.shape) @ layer["out"]
        x, y = (norm(x, before),) * 2 if task.is_post_norm else (x, norm(x, after))
        x = x + jax.nn.gelu(y @ layer["up"]) @ layer["down"]
        x = norm(x, after) if task.is_post_norm else x
    return x if task.is_post_norm else norm(x, next(norms))


def batch_of(name, task, data, key):
    """Ids, labels, and which count."""
    shape = task.batch_size, task.length
    if name == "copy":
        ids = jax.random.randint(key, shape, 0, task.vocab_size)
        mask = jnp.broadcast_to(jnp.arange(task.length) >= 3, shape)
        return ids, jnp.roll(ids, 3, 1), mask
    if name == "masked":
        of_rows, of_mask = jax.random.split(key)
        masked = task.vocab_size - 1
        start, step = jax.random.randint(of_rows, (2, task.batch_size, 2, 1), 0, masked)
        ids = ((start + step * jnp.arange(task.length // 2)) % masked).reshape(shape)
        mask = jax.random.bernoulli(of_mask, 0.15, shape)
        return jnp.where(mask, masked, ids), ids, mask
    starts = jax.random.randint(key, shape[:1], 0, len(data) - task.length)
    ids = data[starts[:, None] + jnp.arange(task.length + 1)]
    return ids[:, :-1], ids[:, 1:], jnp.ones(shape, bool)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def train(name, task, width, scheme, tied, runs, data, held_out):
    """The first and the last loss of each run, the last one on what was not trained on."""
    adam = optax.scale_by_adam(b2=0.98)
    rates = optax.warmup_cosine_decay_schedule(0.0, 1.0, task.warmup, task.steps, 0.1)

    def loss(params, run, data, key, n):
        ids, labels, mask = batch_of(name, task, data, jax.random.fold_in(key, n))
        x = hidden(task, scheme, params, run, ids)
        logits = x @ params["tokens" if tied else "output"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(losses * mask) / jnp.sum(mask)

    def of_run(run):
        def step(carry, n):
            params, state = carry
            key = jax.random.key(run.seed + 1000)
            value, gradient = jax.value_and_grad(loss)(params, run, data, key, n)
            updates, state = adam.update(gradient, state, params)
            rate = run.rate * rates(n)
            return (jax.tree.map(lambda p, u: p - rate * u, params, updates), state), value

        params = draw(task, width, run)
        carry = params, adam.init(params)
        (params, _), curve = jax.lax.scan(step, carry, jnp.arange(task.steps))
        score = lambda n: loss(params, run, held_out, jax.random.key(99), n)
        return curve[0], jax.lax.map(score, jnp.arange(HELD_OUT_BATCHES)).mean()

    at_once = min(len(runs.seed), 64 if width <= 256 else 16)
    return jax.lax.map(of_run, runs, batch_size=at_once)


def text_of(name, task):
    """The ids of Python's standard library, and those of its last 5 %, held out."""
    if name in ("copy", "masked"):
        return (jnp.zeros(1, int),) * 2
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if name in ("bytes", "post_norm"):
        ids = np.frombuffer(text, np.uint8).astype(np.int32)
    else:
        import tokenizers  # noqa: PLC0415

        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        by_bytes = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = by_bytes
        lines = text.decode("utf-8", "ignore").splitlines(keepends=True)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=task.vocab_size, initial_alphabet=by_bytes.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        ids = np.concatenate([np.array(each.ids, int) for each in tokenizer.encode_batch(lines)])
    held_out = len(ids) // 20
    return jnp.asarray(ids[:-held_out]), jnp.asarray(ids[-held_out:])


def measure(name, width, options):
    """A record for each run of a task at a width."""
    task, records = TASKS[name], []
    steps = options.steps or task.steps
    task = task._replace(steps=steps, warmup=options.warmup or steps // 10)
    data, held_out = text_of(name, task)
    schemes = options.schemes or task.schemes
    for scheme, (tied, scale) in itertools.product(schemes, task.kinds):
        factor, starts = starts_of(task, width, scheme, tied, scale)
        seeds, names = range(options.seeds), options.starts or starts
        chosen = [*itertools.product(names, options.rates, seeds)]
        runs = [Run(*starts[start], factor, rate, seed) for start, rate, seed in chosen]
        runs = jax.tree.map(lambda *leaves: jnp.asarray(leaves), *runs)
        found = train(name, task, width, scheme, tied, runs, data, held_out)
        kind = f"{'tied' if tied else 'untied'}, `scale={scale!r}`, {scheme}"
        for numbers in zip(chosen, *map(np.ndarray.tolist, map(np.asarray, found)), strict=True):
            (start, rate, seed), first, last = numbers
            record = {"task": name, "width": width, "kind": kind, "start": start, "rate": rate}
            records.append(record | {"seed": seed, "first": first, "last": last})
    return records


def best(records):
    """The loss at the best rate, a mean over seeds."""
    losses = {}
    for record in records:
        losses.setdefault(record["rate"], []).append(record["last"])
    return min(map(np.mean, losses.values()))


def table(records):
    """A row for each kind, a column for each start, the best rate's mean over seeds."""
    rows, starts = {}, dict.fromkeys(r["start"] for r in records)
    for kind, start in dict.fromkeys((r["kind"], r["start"]) for r in records):
        chosen = [r for r in records if (r["kind"], r["start"]) == (kind, start)]
        cell = f"{best(chosen):.3f} ({np.mean([r['first'] for r in chosen]):.1f})"
        rows.setdefault(kind, [kind]).append(cell)
    return markdown_table(["", *starts], [*rows.values()])


def draw_losses(files):
    """The loss on held-out text after training, by width, of tied and scaled tables."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    kind = "tied, `scale='sqrt_d_model'`, rotary"
    records = [r for r in map(json.loads, lines) if (r["task"], r["kind"]) == ("text", kind)]
    widths = sorted({r["width"] for r in records})
    figure = Figure((6.5, 3.4), layout="constrained", dpi=160)
    ax = figure.subplots()
    ax.set_prop_cycle(color=["#0072B2", "#B0B0B0", "#606060", "#E69F00", "#D55E00", "#CC79A7"])
    for start in dict.fromkeys(r["start"] for r in records):
        # Its losses would leave no room for the others.
        if start == "`hk.Embed`":
            continue
        of_start = [[r for r in records if (r["start"], r["width"]) == (start, w)] for w in widths]
        style = {"linewidth": 3, "zorder": 3} if start == "this package" else {"linestyle": "--"}
        ax.plot(widths, list(map(best, of_start)), marker="o", label=start.strip("`"), **style)
    ax.set_xscale("log", base=2)
    ax.set_xticks(widths, map(str, widths))
    ax.set(xlabel="width", ylabel="held-out loss, nats per token")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    figure.suptitle("a tied model of two layers, by how its table is drawn", fontsize="medium")
    return figure


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--schemes", nargs="+", help="of positions (default: the task's)")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of each run (default: the task's)")
    parser.add_argument("--warmup", type=int, help="steps (default: a tenth of all)")
    parser.add_argument("--starts", nargs="+", help="some of the columns (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add a line for each run to FILE")
    help = "files of --json: train nothing, draw notebooks/pictures/starts.png"
    parser.add_argument("--draw", nargs="+", type=Path, metavar="FILE", help=help)
    options = parser.parse_args()
    if options.draw:
        with matplotlib.style.context("default"):
            draw_losses(options.draw).savefig(PICTURE, metadata={"Software": None})
        return
    for name in options.tasks:
        for width in options.widths:
            records = measure(name, width, options)
            guess = math.log(TASKS[name].vocab_size)
            print(f"\n## {name}, width {width}, log(vocab_size) = {guess:.2f}\n\n{table(records)}")
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
