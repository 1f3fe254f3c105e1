"""The data of own_bert.py: words become ids, documents are packed into rows, and words are hidden."""

import ast
import collections
import functools
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

import transformer_embed as te

LENGTH, VOCAB = 128, 8192
PAD, UNKNOWN, MASK = 0, 1, 2


def read_documents(folder=None):
    """Returns the text files of a folder, or else the docstrings of Python's standard library."""
    if folder is not None:
        files = [path for path in sorted(pathlib.Path(folder).rglob("*")) if path.is_file()]
        files = [path for path in files if path.suffix.lower() in (".txt", ".md", ".rst")]
        if not files:
            raise SystemExit(f"{folder}: found no files that end with .txt, .md or .rst")
        return [path.read_text(encoding="utf-8", errors="replace") for path in files]
    modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    nodes = [node for path in modules for node in ast.walk(ast.parse(path.read_bytes()))]
    documented = ast.Module | ast.ClassDef | ast.FunctionDef
    return [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]


def split_words(text):
    """Splits a text into words and symbols. A line of one symbol, such as =====, is one word."""
    return [match[0] for match in re.finditer(r"\[MASK\]|\w+|([^\w\s])\1*", text)]


def make_vocabulary(documents):
    """Returns the most frequent words. The index of a word in the list is its id."""
    counts = collections.Counter(word for text in documents for word in split_words(text))
    special = ["[PAD]", "[UNKNOWN]", "[MASK]"]
    return special + [word for word, _ in counts.most_common(VOCAB - len(special))]


def encode(vocabulary, texts):
    """Returns the ids of the words of each text, in lists."""
    id_of = {word: n for n, word in enumerate(vocabulary)}
    return [[id_of.get(word, UNKNOWN) for word in split_words(text)] for text in texts]


def cut(documents):
    """Cuts lists of ids that are longer than a batch row into several."""
    return [ids[n : n + LENGTH] for ids in documents for n in range(0, len(ids), LENGTH)]


def pack(documents):
    """Packs lists of ids into batch rows. Returns the ids and the segment ids, [rows, LENGTH].

    The documents of a row are numbered from 1, and padding has the number 0.
    """
    rows = [[]]
    for document in documents:
        if sum(map(len, rows[-1])) + len(document) > LENGTH:
            rows.append([])
        rows[-1].append(document)
    ids, segment_ids = np.zeros((2, len(rows), LENGTH), np.int32)
    for n, row in enumerate(rows):
        lengths = [len(document) for document in row]
        ids[n, : sum(lengths)] = np.concatenate(row)
        segment_ids[n, : sum(lengths)] = np.repeat(np.arange(1, len(row) + 1), lengths)
    return ids, segment_ids


@functools.cache
def read_data(folder=None):
    """Returns the vocabulary, and packed documents: some to train on, and others to evaluate on."""
    texts = read_documents(folder)
    vocabulary = make_vocabulary(texts)
    documents = cut(encode(vocabulary, texts))
    if len(documents) < 2:
        raise SystemExit(f"wanted a text of more than {LENGTH} words")
    order = np.random.default_rng(0).permutation(len(documents))
    shuffled = [documents[n] for n in order]
    held_out = 1 + len(documents) // 20
    training, others = pack(shuffled[held_out:]), pack(shuffled[:held_out])
    for ids, segment_ids in (training, others):
        tokens = te.TokenPositions.from_segment_ids(segment_ids)
        # If you use te.Learned(max_len), pass max_len here, too.
        te.check_batch(ids, tokens, vocab_size=VOCAB, pad_id=PAD, order="packed")
    return vocabulary, training, others


def sample(random, packed, count):
    """Samples batch rows. Returns their ids and segment ids, [count, LENGTH]."""
    ids, segment_ids = packed
    rows = random.integers(0, len(ids), count)
    return ids[rows], segment_ids[rows]


def hide(rng, ids, segment_ids):
    """Chooses 15 % of the tokens. Most of them become `MASK`, some another id, and some stay."""
    choose_rng, action_rng, id_rng = jax.random.split(rng, 3)
    is_chosen = jax.random.bernoulli(choose_rng, 0.15, ids.shape) & (ids != PAD)
    action = jax.random.uniform(action_rng, ids.shape)
    random_ids = jax.random.randint(id_rng, ids.shape, MASK + 1, VOCAB)
    shown = jnp.where(action < 0.8, MASK, jnp.where(action < 0.9, random_ids, ids))
    return jnp.where(is_chosen, shown, ids), segment_ids, ids, is_chosen
