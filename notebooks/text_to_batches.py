"""From text to a trained model: see the page "From text to batches", which explains each part.

    python notebooks/text_to_batches.py --out FOLDER [--steps N] [--process I N ADDRESS] [FILE ...]

Run it again to go on from the last checkpoint.
"""

import argparse
import functools
import hashlib
import math
import pathlib
import sysconfig
import time

import grain
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tokenizers
from grain.checkpoint import CheckpointRestore, CheckpointSave
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import args

import transformer_embed as te

VOCAB_SIZE, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 2048, 128, 4, 2, 256, 8
STEPS_BETWEEN_CHECKPOINTS = 50
PAD, END = 0, 1  # ids of special tokens, of which no text has one
PROMPTS = ["def ", "import ", "class Test", "# "]
CONFIG = te.EmbedderConfig(VOCAB_SIZE, WIDTH, scheme=None, pad_id=PAD, dropout_rate=0.1)


def documents(files):
    """Reads one document per file, by default from the source of Python's standard library."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    return [path.read_text(errors="replace") for path in sorted(map(pathlib.Path, files or library))]


def trained_tokenizer(texts, path):
    """Returns a tokenizer of byte pairs. The first process trains it, and all processes read it."""
    if jax.process_index() == 0 and not path.exists():
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        # Without this alphabet, bytes that the training text lacks would vanish.
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        options = {"special_tokens": ["<pad>", "<end>"], "initial_alphabet": alphabet}
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=VOCAB_SIZE, **options)
        tokenizer.train_from_iterator(texts, trainer)
        tokenizer.save(str(path))
    multihost_utils.sync_global_devices("tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # Or a text with "<pad>" in it would hold the id of padding. A file does not keep this.
    tokenizer.encode_special_tokens = True
    return tokenizer


def windows(tokenizer, texts):
    """Cuts documents into pieces that overlap by one token, so each token is predicted once."""
    encoded = [np.array([*each.ids, END], np.int32) for each in tokenizer.encode_batch(texts)]
    starts = ((ids, start) for ids in encoded for start in range(0, len(ids) - 1, LENGTH - 1))
    return [ids[start : start + LENGTH] for ids, start in starts]


def packed(dataset, seed):
    """Packs pieces into batch rows of LENGTH tokens, and adds padding."""
    # For data in memory, threads would only cost.
    without = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    dataset = dataset.map(lambda ids: {"ids": ids}).to_iter_dataset(without)
    options = {"length_struct": {"ids": LENGTH}, "num_packing_bins": 64, "seed": seed}
    return grain.experimental.FirstFitPackIterDataset(dataset, **options)


def training_batches(pieces, seed):
    """Returns this process's share of the batches, which never end, so no process waits for another."""
    share = slice(jax.process_index(), None, jax.process_count())
    dataset = packed(grain.MapDataset.source(pieces).shuffle(seed)[share].repeat(), seed)
    dataset = dataset.batch(BATCH // jax.process_count(), drop_remainder=True)
    return iter(grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=8))


def evaluation_batches(pieces):
    """Yields batches with each piece once. All processes pack alike, and take a part of each batch."""
    rows = list(packed(grain.MapDataset.source(pieces), seed=0))
    fields = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    part = BATCH // jax.process_count()
    own = slice(jax.process_index() * part, (jax.process_index() + 1) * part)
    # Rows of padding fill the last batch.
    fields = {name: np.pad(a, ((0, -len(a) % BATCH), (0, 0))) for name, a in fields.items()}
    for start in range(0, len(rows), BATCH):
        yield {name: field[start : start + BATCH][own] for name, field in fields.items()}


def hidden(ids, tokens, is_training):
    """Returns the last hidden vectors, and the output layer."""
    embed = te.TransformerEmbedding(CONFIG)
    x = embed(ids, is_training=is_training)
    mask = te.AttentionMask(tokens, causal=True).dense()
    for _ in range(LAYERS):
        x = x + attention(hk.RMSNorm(-1)(x), tokens.positions, mask)
        x = x + hk.nets.MLP([4 * WIDTH, WIDTH], activation=jax.nn.gelu)(hk.RMSNorm(-1)(x))
    return hk.RMSNorm(-1)(x), embed.output()


def attention(x, positions, mask):
    heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
    linear = functools.partial(hk.Linear, WIDTH, with_bias=False)
    query, key, value = (linear(name=n)(x).reshape(heads) for n in ("query", "key", "value"))
    query, key = (te.apply_rotary(each, positions) for each in (query, key))
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return linear(name="attended")(attended.reshape(x.shape))


MODEL = hk.transform(hidden)


def sum_of_losses(params, batch, rng, is_training):
    """Returns the sum of the losses of a batch, and the number of labels."""
    # What grain says of a packed row is what TokenPositions takes.
    tokens = te.TokenPositions(batch["ids_positions"], segment_ids=batch["ids_segment_ids"])
    x, output = MODEL.apply(params, rng, batch["ids"], tokens, is_training)
    options = {"shift": True, "segment_ids": tokens.segment_ids, "reduction": "sum"}
    loss = te.linear_cross_entropy(x, output, batch["ids"], **options)
    return loss, tokens.next_token_mask.sum()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, b2=0.95))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state, batch):
    # A key that the number of the step decides needs no place in a checkpoint.
    rng = jax.random.fold_in(jax.random.key(1), state["step"])

    def mean(params):
        loss, count = sum_of_losses(params, batch, rng, is_training=True)
        return loss / count

    loss, grads = jax.value_and_grad(mean)(state["params"])
    updates, opt_state = OPTIMIZER.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss


evaluation_step = jax.jit(functools.partial(sum_of_losses, rng=None, is_training=False))


@functools.partial(jax.jit, static_argnames=("steps", "top_p"))
def generate(params, rng, ids, lengths, *, steps, top_p):
    """Continues each row of ids [batch, length] until the token END.

    Each step reads all tokens again. With a cache of keys and values, it would read only the new
    ones: see the page "Decoding recipes".
    """

    def next_token(carry, rng):
        ids, lengths, is_open = carry
        tokens = te.TokenPositions.from_lengths(lengths, ids.shape[1])
        x, output = MODEL.apply(params, None, ids, tokens, False)
        last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)[:, 0]
        logits = te.linear_logits(last, output)
        order = jnp.argsort(-logits)
        falling = jax.nn.softmax(jnp.take_along_axis(logits, order, -1))
        # The fewest tokens that have top_p of the probability, and always the first.
        kept = jnp.cumsum(falling, -1) - falling < top_p
        choice = jax.random.categorical(rng, jnp.where(kept, jnp.log(falling), -jnp.inf))
        token = jnp.where(is_open, jnp.take_along_axis(order, choice[:, None], -1)[:, 0], PAD)
        ids = jnp.where(jnp.arange(ids.shape[1]) == lengths[:, None], token[:, None], ids)
        return (ids, lengths + is_open, is_open & (token != END)), None

    start = ids, lengths, jnp.ones_like(lengths, bool)
    return jax.lax.scan(next_token, start, jax.random.split(rng, steps))[0][0]


def initial(rng):
    ids, tokens = jnp.zeros([1, LENGTH], jnp.int32), te.TokenPositions.from_lengths([LENGTH], LENGTH)
    params = MODEL.init(rng, ids, tokens, False)
    return {"params": params, "opt_state": OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def train(state, batches, steps, checkpoints, put, say):
    """Trains up to a number of steps. Continues from the last checkpoint, with the loader's state."""
    if (last := checkpoints.latest_step()) is not None:
        restored = {"state": args.StandardRestore(state), "data": CheckpointRestore(batches)}
        state = checkpoints.restore(last, args=args.Composite(**restored))["state"]
    first, waited, padding, began = int(state["step"]), 0.0, [], time.perf_counter()
    for step in range(first, steps):
        waited -= time.perf_counter()
        local = next(batches)
        waited += time.perf_counter()
        padding.append(np.mean(local["ids_segment_ids"] == 0))
        state, loss = train_step(state, put(local))
        if step == first:
            say(f"step {step + 1}: loss {float(loss):.3f}, log(vocabulary) {math.log(VOCAB_SIZE):.3f}")
            waited, began = 0.0, time.perf_counter()  # without the time to compile
        if (step + 1) % STEPS_BETWEEN_CHECKPOINTS == 0:
            saved = {"state": args.StandardSave(state), "data": CheckpointSave(batches)}
            checkpoints.save(step + 1, args=args.Composite(**saved))
            taken = time.perf_counter() - began
            rate = (step - first) * BATCH * LENGTH / taken
            say(f"step {step + 1}: loss {float(loss):.3f}, {rate:,.0f} tokens/s,", end=" ")
            say(f"{waited / taken:.1%} of the time waiting, {np.mean(padding):.1%} padding")
    checkpoints.wait_until_finished()
    return state["params"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--process", nargs=3, metavar=("I", "N", "ADDRESS"))
    flags = parser.parse_args()
    texts = documents(flags.files)
    if len(texts) < 2:
        parser.error(f"files: wanted at least two, of which one is held out, got {len(texts)}")
    if flags.process:
        jax.distributed.initialize(flags.process[2], int(flags.process[1]), int(flags.process[0]))
    say = print if jax.process_index() == 0 else lambda *_, **__: None
    out = flags.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    held_out, training = texts[::20], [text for n, text in enumerate(texts) if n % 20]
    tokenizer = trained_tokenizer(training, out / "tokenizer.json")
    train_pieces, eval_pieces = (windows(tokenizer, each) for each in (training, held_out))
    say(f"{len(training)} documents in {len(train_pieces):,} pieces")

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    to_global = functools.partial(jax.make_array_from_process_local_data, split)
    put = functools.partial(jax.tree.map, to_global)
    state = jax.jit(initial, out_shardings=whole)(jax.random.key(0))
    batches, checkpoints = training_batches(train_pieces, 0), ocp.CheckpointManager(out / "checkpoints")
    params = train(state, batches, flags.steps, checkpoints, put, say)
    sums = [evaluation_step(params, put(local)) for local in evaluation_batches(eval_pieces)]
    loss, count = (sum(map(float, each)) for each in zip(*sums, strict=True))
    assert count == sum(len(piece) - 1 for piece in eval_pieces), "each label comes once"
    say(f"held out: {loss / count:.3f} nats per token, {count:,.0f} tokens")
    params = jax.device_get(params)
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    ids = np.array([[*ids, *[PAD] * (96 - len(ids))] for ids in prompts], np.int32)
    lengths = np.array([*map(len, prompts)], np.int32)
    for row in generate(params, jax.random.key(2), ids, lengths, steps=80, top_p=0.8).tolist():
        say("---\n" + tokenizer.decode(row))
    data = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(params))
    say(f"---\nparameters: sha256 {hashlib.sha256(data).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
