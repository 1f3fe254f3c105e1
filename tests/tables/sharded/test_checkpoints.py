"""Sharded tables in checkpoints: of Orbax, on other meshes, and in vocabulary order."""

import functools

import jax
import optax
import pytest
from compare import equal, near
from sharded_tables import AUTO, BOTH, EXPLICIT, SPEC, mesh_of, on_host, restored, stripe

import transformer_embed as te
from transformer_embed._src.tables.sharded.row_order import RowOrder

NAME = "transformer_embedding/~/token_embedding"
CONFIG = te.EmbedderConfig(vocab_size=37, d_model=8, pad_id=0)
ADAM = optax.adam(0.01)


def init(rng):
    drawn = jax.random.normal(rng, (300, 4))
    params = {"contiguous": drawn, "striped": drawn + 1}
    return params, jax.tree.map(lambda leaf: leaf + 1, ADAM.init(params))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_is_restored_on_others_as_a_step_needs_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    place = functools.partial(
        te.sharding.shard_params,
        rules={"*contiguous": SPEC("model"), "*striped": SPEC(BOTH)},
        tables="*",
        stripe="*striped",
        virtual_shards=16,
    )
    rng = jax.random.key(0)
    shapes = jax.eval_shape(init, rng)
    saved = te.sharding.init_params(init, rng, place(shapes, mesh_of((2, 2))))
    kept = on_host(saved)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
    for shape in ((1, 1), (1, 4)):
        target = place(shapes, mesh_of(shape))
        found = restored(tmp_path / "step", target)
        assert jax.tree.structure(found) == jax.tree.structure(target)
        jax.tree.map(assert_placed, found, target)
        equal(on_host(found), kept)


def assert_placed(array, target):
    assert (array.shape, array.sharding) == (target.shape, target.sharding)


def test_paths_tell_orders_of_rows_apart():
    """A checkpoint of 8,192 rows was restored, permuted, as a table of another layout."""
    orders = [RowOrder(8192, 1, 128), RowOrder(8192, 64), RowOrder(8192, 4096)]
    assert len({order.size for order in orders}) == 1
    table = stripe(mesh_of((1, 2)), SPEC("model"))
    ((path, _),) = jax.tree_util.tree_leaves_with_path(table)
    assert path[0].name == table.split.order.name
    assert len({order.name for order in orders}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [(EXPLICIT, {}), (AUTO, {"stripe": "*/embeddings", "virtual_shards": 16})],
    ids=["contiguous", "striped"],
)
def test_resizing_and_saving_use_vocabulary_order(tmp_path, kind, options):
    params = te.Embedder(CONFIG).init(jax.random.key(7))
    mesh, rules = mesh_of((1, 2), kind), {"*/embeddings": SPEC("model")}
    placed = te.sharding.shard_params(params, mesh, rules, **options)
    plain = params[NAME]["embeddings"]
    expected = te.resize_vocabulary(params, 50, rng=jax.random.key(1))[NAME]["embeddings"]
    resized = te.resize_vocabulary(placed, 50, rng=jax.random.key(1))[NAME]["embeddings"]
    assert resized.shape == (50, 8)
    assert resized.sharding == placed[NAME]["embeddings"].sharding
    # The mean and the spread are summed in another order.
    near(on_host(resized), expected, atol=1e-6)
    te.pretrained.save_embedder(tmp_path / "model.safetensors", CONFIG, placed)
    loaded = te.pretrained.load_embedder(tmp_path / "model.safetensors").params
    equal(loaded[NAME]["embeddings"], plain)
