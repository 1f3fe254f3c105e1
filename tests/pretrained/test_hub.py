"""Files of well-known repositories, as they are published, against the library's reading of them."""

import json

import numpy as np
import pytest
from checkpoints import GOLDEN, load_embedder

import transformer_embed as te
from transformer_embed._src.positions.rotary_scaling import scaled_frequencies
from transformer_embed._src.pretrained import checkpoints, files

CONFIGS = json.loads((GOLDEN / "hub_configs.json").read_text(encoding="utf-8"))["configs"]
FACTS = json.loads((GOLDEN / "hub_facts.json").read_text(encoding="utf-8"))["cases"]
# Of each: what must be said besides the published file.
SAID = {"meta-llama/Llama-3.2-11B-Vision": {"vocab_size": 128264}}
# In the library, float32 numbers and their powers.
FREQUENCY = 2e-6


@pytest.fixture
def described(tmp_path, monkeypatch):
    """Loads a repository's files, whose tensors have no data."""
    monkeypatch.setattr(checkpoints, "read_parameters", lambda *_: {})
    monkeypatch.setattr(files.Tensors, "are_equal", lambda _, name, other: name == other)

    def described(repository, tensors, **options):
        path = tmp_path / "model.safetensors"
        entries = {
            name: files.TensorInfo(path, "BF16", tuple(shape), 0, 0)
            for name, shape in tensors.items()
        }
        opened = files.Tensors(path, dict.fromkeys(entries, path), {}, lambda _: (entries, {}))
        monkeypatch.setattr(checkpoints, "open_tensors", lambda path: opened)
        (tmp_path / "config.json").write_text(json.dumps(CONFIGS[repository]))
        return load_embedder(path, **{"settings": SAID.get(repository)} | options)

    return described


def frequencies_of(options, pairs):
    """The frequencies of nine rotated pairs of a head, and the factor of cosines and sines."""
    dim = options.get("rotary_dim", 2 * pairs)
    assert dim == 2 * pairs
    found, factor = scaled_frequencies(options.get("scaling"), dim, options["base"])
    places = sorted({round(n * (pairs - 1) / 8) for n in range(9)})
    return found[places].astype(float), factor


@pytest.mark.parametrize("repository", FACTS)
def test_a_published_file_is_read_as_the_library_reads_it(described, repository):
    facts = FACTS[repository]
    has_stacks = CONFIGS[repository].get("is_encoder_decoder") and "whisper" not in repository
    found = described(repository, facts["tensors"], stack="decoder" if has_stacks else None)
    config, output = found.config, found.config.output
    width = config.embedding_width or config.d_model
    assert [config.vocab_size, width] == facts["table"]
    scale = config.d_model**0.5 if config.scale == "sqrt_d_model" else config.scale
    assert scale == pytest.approx(facts["scale"])
    assert config.layer_norm_eps == facts["norm"]
    positions = config.scheme and [config.scheme.start, config.scheme.max_len]
    assert positions == facts["positions"]
    if isinstance(output, te.OutputConfig):
        assert output.tied == facts["tied"]
        assert output.softcap == facts["softcap"]
    bias = found.bias or {}
    buckets, distance = facts["bias"]
    assert bias.get("num_buckets") == buckets
    assert bias.get("max_distance") == (distance or bias.get("max_distance"))
    rotations = {layer.type: layer.rotary for layer in found.layers if layer.rotary}
    for kind, said in facts["rotations"].items():
        options = rotations.get(kind) or next(filter(None, rotations.values()))
        ours, factor = frequencies_of(options, said["pairs"])
        np.testing.assert_allclose(ours, said["frequencies"], rtol=FREQUENCY)
        assert factor == pytest.approx(said["factor"], rel=1e-6)
    assert bool(rotations) == bool(facts["rotations"]) or "gpt-j" in repository


def tensors_of(entries):
    """The tensors of an encoder's input layer without positions, with their shapes."""
    rows, width, types = (entries[f"{name}_size"] for name in ("vocab", "hidden", "type_vocab"))
    tensors = {f"embeddings.LayerNorm.{end}": [width] for end in ("weight", "bias")}
    tensors |= {"embeddings.token_type_embeddings.weight": [types, width]} if types else {}
    return tensors | {"embeddings.word_embeddings.weight": [rows, width]}


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("jinaai/jina-embeddings-v2-base-en", "is not read .*, got position_embedding_type: 'alibi'$"),
        ("jinaai/jina-embeddings-v3", "wanted the tensors of one model xlm-roberta"),
        ("Alibaba-NLP/gte-base-en-v1.5", "rope_type: wanted one of .*, got 'ntk'$"),
        ("Alibaba-NLP/gte-multilingual-base", "rope_type: wanted one of .*, got 'ntk'$"),
    ],
)  # fmt: skip
def test_what_their_own_code_computes_otherwise_is_refused(described, repository, message):
    entries = CONFIGS[repository]
    tensors = tensors_of(entries)
    if entries["position_embedding_type"] == "alibi":
        tensors["embeddings.position_embeddings.weight"] = [8192, entries["hidden_size"]]
    with pytest.raises(ValueError, match=message):
        described(repository, tensors)
