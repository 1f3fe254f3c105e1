"""Sharded tables in checkpoints: of Orbax, on other meshes, and in vocabulary order."""

import functools

import jax
import optax
import pytest
from compare import equal, near
from sharded_tables import AUTO, BOTH, EXPLICIT, SPEC, mesh_of, on_host

import transformer_embed as te

NAME = "transformer_embedding/~/token_embedding"
CONFIG = te.EmbedderConfig(vocab_size=37, d_model=8, pad_id=0)
ADAM = optax.adam(0.01)


def init(rng):
    params = {
        "cut": jax.random.normal(rng, (300, 4)),
        "dealt": jax.random.normal(rng, (300, 4)) + 1,
    }
    return params, jax.tree.map(lambda leaf: leaf + 1, ADAM.init(params))


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_is_restored_on_others_as_a_step_needs_it(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint", reason="Orbax is of the test extra")
    place = functools.partial(
        te.sharding.shard_params,
        rules={"*cut": SPEC("model"), "*dealt": SPEC(BOTH)},
        tables="*[td]",
        stripe="*dealt",
        virtual_shards=16,
    )
    saved = place(init, mesh_of((2, 2)), rng=jax.random.key(0))
    shapes, kept = jax.eval_shape(init, jax.random.key(0)), on_host(saved)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
        for mesh in (mesh_of((1, 1)), mesh_of((1, 4))):
            target = place(shapes, mesh)
            args = jax.tree.map(
                lambda leaf: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape),
                target,
            )
            restored = checkpointer.restore(
                tmp_path / "step", args=ocp.args.PyTreeRestore(item=target, restore_args=args)
            )
            assert jax.tree.structure(restored) == jax.tree.structure(target)
            for found, leaf in zip(*map(jax.tree.leaves, (restored, target)), strict=True):
                assert (found.shape, found.sharding) == (leaf.shape, leaf.sharding)
            equal(on_host(restored), kept)


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
    smaller = te.resize_vocabulary(placed, 20)[NAME]["embeddings"]
    equal(on_host(smaller), plain[:20])
    te.pretrained.save_embedder(tmp_path / "model.safetensors", CONFIG, placed)
    loaded = te.pretrained.load_embedder(tmp_path / "model.safetensors").params
    equal(loaded[NAME]["embeddings"], plain)
