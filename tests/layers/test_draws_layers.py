"""Draws of configs, ids, positions, doors and modes: the input layer in float64."""

import draws
import embeddings
import pytest

DOORS = [door.__name__ for door in (embeddings.embedder, embeddings.haiku, embeddings.parts)]
SCHEMES = [
    "te.SinusoidalGrid((2, 3), axes=(1, 0))",
    "te.Sinusoidal(odd='zero', shift=1, at_padding=3)",
    "te.Sinusoidal()",
    "None",
    "te.Learned(9, start=2, at_padding=1)",
    "te.Sinusoidal(layout='cos_sin', start=5, base=500.0)",
    "te.Learned(8)",
]


def of_whole(*choices):
    """Choices that functions of parts do not have."""
    return lambda chosen: [None] if chosen["door"] == "parts" else [None, *choices]


def pad_ids(chosen):
    return [0, 3] if "at_padding" in chosen["scheme"] else [None, 0, 3, 6]


def positions(chosen):
    kinds = {"None": ["far"], "te.S": ["near", "far", "fractional"], "te.L": ["near"]}
    of_grid = ["near"] if "Grid" in chosen["scheme"] else None
    return ["counted", *(of_grid or kinds[chosen["scheme"][:4]])]


def changes(chosen):
    same = ["config, batches", "embeddings.saved(config, batches)"]
    sizes, lengths = ["vocab_size=12"], []
    if chosen["ids"] != "outside" and chosen["pad_id"] != 6:
        sizes += ["vocab_size=5"]
    if "te.L" in chosen["scheme"]:
        lengths = ["max_len=12", "max_len=12, keep_positions=True"]
        lengths += ["max_len=5"] * (chosen["positions"] != "counted")
    if "start=2" in chosen["scheme"]:
        # Few draws have it, and what only it shows is how positions are resized.
        same, sizes = [], []
    return same + [f"embeddings.resized(config, batches, {size})" for size in sizes + lengths]


SPACE = draws.Space(
    {
        "door": DOORS,
        "scheme": SCHEMES,
        "pad_id": pad_ids,
        "ids": ["padded", "padded", "outside"],
        "positions": positions,
        "shape": ["(5,)", "(2, 6)", "(1, 2, 3)"],
        "scale": ["sqrt_d_model", 1.0, 0.3],
        "num_token_types": of_whole(2),
        "layer_norm_eps": of_whole(1e-12, 0.1),
        "embedding_width": of_whole(4),
        "out_of_range": ["nan", "clip", "zero"],
        "lookup_style": ["gather", "one_hot"],
        "param_dtype": ["float32", "float32", "bfloat16", "float16"],
        "dtype": [None, None, "float32", "bfloat16"],
        "output": ["None", "te.OutputConfig()", "te.OutputConfig(tied=False, bias=True)"],
        "is_training": [False, False, True],
        "dropout_rate": [0.0, 0.5],
        "change": changes,
        "mode": list(draws.MODES),
    },
    default=13,
    quick=4,
)
FIELDS = [
    "pad_id",
    "scale",
    "num_token_types",
    "layer_norm_eps",
    "embedding_width",
    "out_of_range",
    "lookup_style",
    "param_dtype",
    "dtype",
    "dropout_rate",
]
PROGRAM = """\
import draws, embeddings, functools, transformer_embed as te
config = te.EmbedderConfig(7, 6, {scheme}, output={output}, {fields})
batches = [embeddings.batch(config, n, {ids!r}, {positions!r}, {shape}) for n in {seeds}]
config, batches = {change}
f = functools.partial(embeddings.{door}, config, {is_training})
embeddings.check(config, {is_training}, draws.call({mode!r}, f, batches), batches)
"""


@pytest.mark.parametrize("number", SPACE.numbers())
def test_input_layers(number):
    chosen = SPACE.choices(number)
    given = {name: getattr(chosen, name) for name in FIELDS}
    fields = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    seeds = [2 * number, 2 * number + 1]
    program = PROGRAM.format(**vars(chosen), fields=fields, seeds=seeds)
    with draws.repeated_by(number, program):
        draws.run(number, program)
