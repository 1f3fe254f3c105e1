"""The config, the schemes and the output layer as values: equal by value, each field checked."""

import dataclasses
import re

import pytest
from refused import each_raises

import transformer_embed as te

CONFIG = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0)


def test_configs_are_frozen_hashable_and_equal_by_value():
    same = te.EmbedderConfig(vocab_size=11, d_model=8, pad_id=0, param_dtype="float32")
    assert same == CONFIG
    assert {CONFIG: 1}[same] == 1
    assert dataclasses.replace(CONFIG, d_model=9) != CONFIG
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'd_model'"):
        CONFIG.d_model = 9


FIELDS = {
    "config(vocab_size=0)": "ValueError: vocab_size: ... got 0",
    "config(d_model=-1)": "ValueError: d_model: ... got -1",
    "config(scheme='learned')": "TypeError: scheme: ... got str 'learned'",
    "config(scheme=te.Sinusoidal)": "TypeError: scheme: ... got type <class ...",
    "config(dropout_rate=1.0)": "ValueError: dropout_rate: ... got 1.0",
    "config(pad_id=0.0)": "TypeError: pad_id: ... got float 0.0",
    "config(scale=True)": "TypeError: scale: ... got bool True",
    "config(scale=0.0)": "ValueError: scale: ... got 0.0",
    "config(scale=None)": "ValueError: scale: ... got None",
    "config(scale='sqrt')": "ValueError: scale: ... got 'sqrt'",
    "config(num_token_types=0)": "ValueError: num_token_types: ... got 0",
    "config(layer_norm_eps=0.0)": "ValueError: layer_norm_eps: ... got 0.0",
    "config(embedding_width=0)": "ValueError: embedding_width: ... got 0",
    "config(init_stddev=0.0)": "ValueError: init_stddev: ... got 0.0",
    "config(row_multiple=0)": "ValueError: row_multiple: ... got 0",
    "config(spread=1)": "TypeError: spread: ... got int 1",
    "config(out_of_range='wrap')": "ValueError: out_of_range: ... got 'wrap'",
    "config(lookup_style='matmul')": "ValueError: lookup_style: ... got 'matmul'",
    "config(param_dtype='int32')": "TypeError: param_dtype: ... got int32",
    "config(dtype='int8')": "TypeError: dtype: ... got int8",
    "config(output=False)": "TypeError: output: ... got bool False",
    "config(output='a reason')": "TypeError: output: ... got str 'a reason'",
    "te.OutputConfig(tied=0)": "TypeError: tied: ... got int 0",
    "te.OutputConfig(bias=None)": "TypeError: bias: ... got None",
    "te.OutputConfig(softcap=0.0)": "ValueError: softcap: ... got 0.0",
    "te.OutputConfig(scale=0)": "ValueError: scale: ... got 0",
    "te.OutputConfig(scale=None)": "TypeError: scale: ... got None",
}
TOGETHER = {
    "te.Learned(0)": "ValueError: max_len: ... 1, got 0",
    "te.Learned(9, at_padding=True)": "TypeError: at_padding: ... got bool True",
    "te.Learned(9, start=9)": "ValueError: start: ... 8, got 9",
    "te.Learned(9, at_padding=9)": "ValueError: at_padding: ... 8, got 9",
    "te.Sinusoidal(start=2**31)": "ValueError: start: ... 2147483646, got 2147483648",
    "te.Sinusoidal(layout='halves')": "ValueError: layout: ... got 'halves'",
    "config(scheme=te.Sinusoidal(odd='zero', frequency_scale=1e30))": "ValueError: base and frequency_scale: ... got 1.00e+30 radians",
    "config(scheme=te.Sinusoidal(shift=3), embedding_width=4)": "ValueError: shift: ... 2, got 3.0",
    "config(scheme=te.Learned(9, at_padding=1), pad_id=None)": "ValueError: pad_id: ... got None",
    "config(d_model=7, scheme=te.SinusoidalGrid((2, 3)))": "ValueError: d_model: ... got 7",
    "te.SinusoidalGrid((2, 3), axes=(0, 0))": "ValueError: axes: ... got (0, 0)",
    "te.SinusoidalGrid((46341, 46341))": "ValueError: shape: ... 2147483647, got 2147488281",
    "te.SinusoidalGrid((2, 3), axis_positions=[[0, 1]])": "ValueError: axis_positions: ... [[2], [3]], got [[2]]",
    "te.SinusoidalGrid((2, 3), axis_positions=[[0, 'a'], [0, 1, 2]])": "TypeError: axis_positions[0][1]: ... got str 'a'",
    # A width that no array has is refused at once.
    "config(d_model=10**12)": "ValueError: d_model: wanted an int of at most ... got 1000000000000",
    "te.sinusoidal_table(3, 10**12)": "ValueError: d_model: wanted an int of at most ... got 1000000000000",
    "te.SinusoidalGrid((2, 2), odd='zero').encoding([0], 10**12)": "ValueError: d_model: wanted an int of at most ... got 1000000000000",
}  # fmt: skip


def config(**fields):
    return dataclasses.replace(CONFIG, **fields)


def test_each_field_is_refused_by_name():
    each_raises(FIELDS | TOGETHER, globals())
    named = re.findall(r"(\w+)\((\w+)=", " ".join(FIELDS))
    for maker, kind in (("config", te.EmbedderConfig), ("OutputConfig", te.OutputConfig)):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert fields == {field for called, field in named if called == maker}
