"""Reading any tensor of a checkpoint: names, facts, shardings, dtypes and transposes."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, checkpoint, tensors_of
from compare import equal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from refused import each_raises
from safetensors.numpy import save_file

import transformer_embed as te

ARRAYS = {
    "table": np.arange(64, dtype=np.float32).reshape(16, 4),
    "cube": np.arange(64, dtype=np.float16).reshape(8, 2, 4),
    "vector": np.arange(8, dtype=np.int32),
    "scalar": np.array(3.0, np.float32),
    "ids": np.arange(8, dtype=np.int64),
    "flags": np.array([True, False]),
}


@pytest.fixture
def opened():
    save_file(ARRAYS, "model.safetensors")
    return te.pretrained.open_checkpoint(".")


def test_any_tensor_is_read_as_it_is(opened):
    assert opened.names == sorted(ARRAYS)
    names = [name for name in ARRAYS if name != "ids"]
    for name, array in opened.read(names).items():
        assert (array.shape, array.dtype) == (ARRAYS[name].shape, ARRAYS[name].dtype)
        equal(array, ARRAYS[name])
        assert opened.facts(name) == (ARRAYS[name].shape, ARRAYS[name].dtype, None)
    equal(opened.read(["ids"], dtype="int32")["ids"], ARRAYS["ids"])
    read = opened.read(["table.T", "cube.T"], dtype=jnp.bfloat16)
    assert read["table.T"].dtype == jnp.bfloat16
    equal(read["table.T"].astype(np.float32), ARRAYS["table"].T)
    equal(read["cube.T"].astype(np.float32), ARRAYS["cube"].T)


def test_a_name_of_the_metadata_is_read_unless_it_has_an_entry_of_its_own():
    """`safetensors.torch.save_model` stores a tensor once, and maps its other names to that name."""
    save_file(ARRAYS, "model.safetensors", {"tied": "table", "cube": "table"})
    read = te.pretrained.open_checkpoint(".").read(["tied", "cube"])
    equal(read["tied"], ARRAYS["table"])
    equal(read["cube"], ARRAYS["cube"])


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("x", None)])
@pytest.mark.parametrize("name", ["table", "table.T", "cube"])
def test_each_device_reads_its_part(opened, name, spec):
    mesh = jax.make_mesh((2,), ("x",))
    sharding = NamedSharding(mesh, spec)
    array = opened.read([name], shardings={name: sharding}, dtype="float32")[name]
    assert array.sharding == sharding
    expected = ARRAYS[name.removesuffix(".T")]
    equal(np.asarray(array), expected.T if name.endswith(".T") else expected)


def test_facts_say_which_linear_layers_are_transposed():
    """PyTorch writes [out, in], and GPT-2 [in, out]; tables are none."""
    for name, weight, is_transposed in (
        ("gpt2", "transformer.h.0.mlp.c_fc.weight", False),
        ("llama, older", "model.layers.0.mlp.up_proj.weight", True),
    ):
        case = CASES[name]
        table = next(key for key in tensors_of(case) if "wte" in key or "embed_tokens" in key)
        checkpoint(case, change={weight: np.ones((8, 4), np.float32)})
        found = te.pretrained.open_checkpoint("model.safetensors")
        assert found.facts(weight).is_transposed is is_transposed
        assert found.facts(table).is_transposed is None
    pathlib.Path("config.json").unlink()
    assert te.pretrained.open_checkpoint(".").facts(weight).is_transposed is None


def test_only_shards_that_are_needed_are_opened():
    save_file({"a": ARRAYS["table"]}, "a.safetensors")
    index = json.dumps({"weight_map": {"a": "a.safetensors", "b": "missing.safetensors"}})
    pathlib.Path("model.safetensors.index.json").write_text(index)
    found = te.pretrained.open_checkpoint(".")
    assert repr(found) == "Checkpoint('model.safetensors.index.json', 2 tensors)"
    equal(found.read(["a"])["a"], ARRAYS["table"])


def read(*names, **options):
    save_file(ARRAYS, "model.safetensors")
    return te.pretrained.open_checkpoint(".").read(*names, **options)


REFUSED = {
    "read('table')": "TypeError: names: wanted a sequence of names, got 'table'",
    "read(['tables'])": "ValueError: model.safetensors: wanted a tensor tables, got 6 tensors: ",
    "read(['ids'])": "ValueError: dtype of ids: wanted a dtype that jax has (or x64 turned on), got int64",
    "read(['table'], shardings={'table': 1})": "TypeError: shardings: table: wanted a NamedSharding, got int 1",
    "read(['table'], shardings={'cube': NamedSharding(jax.make_mesh((2,), ('x',)), P())})": "ValueError: shardings: wanted some of the names, got 'cube'",
    "read(['vector'], shardings={'vector': NamedSharding(jax.make_mesh((3,), ('x',)), P('x'))})": "ValueError: shardings: vector: ",
}  # fmt: skip


def test_wrong_names_and_dtypes_are_refused():
    each_raises(REFUSED, globals())
