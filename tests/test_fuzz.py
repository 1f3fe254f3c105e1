"""Any value in the place of any argument: a public function gives what a slow oracle gives, where
there is one, or raises a TypeError or ValueError."""

import inspect
import itertools

import calls
import public
import pytest
from calls import GOOD, TABLE, calls_of
from cases import few
from fuzzing import VALUES, bounded, call, named_on_failure
from meshes import mesh_of, put
from references import CHECKS, assert_right, grid_encoding

import transformer_embed as te

TOKENS = te.TokenPositions([range(4)], segment_ids=[[1, 1, 1, 1]])
MASK = te.AttentionMask(TOKENS, causal=True)
SPLIT = put(mesh_of((2,), ("x",)), TABLE, "x")
CALLABLES = [
    "te.AttentionMask(queries=TOKENS, causal=True)",
    "MASK.tile(query_start=0, key_start=0, shape=(2, 2))",
    "MASK.tile_kinds(shape=(2, 2))",
    "te.TokenPositions(positions=POSITIONS)",
    "te.TokenPositions.from_parents(parents=POSITIONS - 1)",
    "TOKENS.take(order=POSITIONS)",
    "TOKENS.with_block_ids(block_ids=[0, 0, 1, 1])",
    "TOKENS.clear(where=[True])",
    "te.kernels.dot_product_attention_kwargs(mask=MASK, order='full')",
    "te.kernels.flash_attention_kwargs(mask=MASK, order='full')",
    "te.kernels.mha_kwargs(mask=MASK, order='full', batch_size=1)",
    "te.rows.exchange_load(table=SPLIT, ids=IDS)",
    "te.rows.RowGradient(row_indices=POSITIONS, values=TABLE[:3], num_rows=4)",
    "te.OutputLayer(table=TABLE)",
    "te.OutputConfig()",
    "te.EmbedderConfig(vocab_size=8, d_model=4)",
    "te.Sinusoidal()",
    "te.SinusoidalGrid(shape=(2, 2))",
    "te.Learned(max_len=4)",
    "te.plots.plot_encoding(encoding=TABLE)",
    "te.plots.plot_mask(mask=TABLE > 0)",
    "te.plots.plot_rotary(positions=POSITIONS, head_dim=4)",
    "te.plots.plot_bias(bias=TABLE)",
]
CALLABLES = calls_of(CALLABLES, vars(calls) | globals())
CASES = [pytest.param(*case, id=case[0].__qualname__) for case in (GOOD | CALLABLES).items()]


def test_every_public_function_is_fuzzed():
    functions = {name for name in public.TOP if inspect.isfunction(getattr(te, name))}
    assert functions <= {function.__name__ for function in GOOD}
    assert CHECKS.keys() <= GOOD.keys() | {grid_encoding}


@pytest.mark.slow
@pytest.mark.parametrize(("function", "good"), CASES)
def test_any_argument_gives_a_right_result_or_an_error(function, good):
    names = inspect.signature(function).parameters.keys() - {"ax"}
    if function.__name__.startswith("plot_"):
        from matplotlib.figure import Figure  # noqa: PLC0415

        good = good | {"ax": Figure().subplots()}
    changes = [(None, None), *few(itertools.product(sorted(names), VALUES), 10)]
    for name, value in changes:
        arguments = good if name is None else good | {name: bounded(name, value)}
        with named_on_failure(arguments):
            returned, result = call(function, arguments)
            assert returned or name
            if returned and function in CHECKS:
                assert_right(function, result, **arguments)
