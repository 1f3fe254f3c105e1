"""The config.json of well-known repositories, as they are published, against the library's reading
of them."""

import pytest
from checkpoints import golden
from compare import near
from refused import each_raises, refused

import transformer_embed as te
from transformer_embed._src.positions.rotary_scaling import scaled_frequencies

CONFIGS = golden("hub_configs.json")["configs"]
FACTS = golden("hub_facts.json")["cases"]
# In the library, float32 numbers and their powers.
FREQUENCY = 2e-6
V4 = golden("deepseek_v4.json")["cases"]


def assert_rotates(options, said):
    """Nine of the frequencies of a head's pairs, and the factor of cosines and sines."""
    dim, pairs = 2 * said["pairs"], said["pairs"]
    assert options.get("rotary_dim", dim) == dim
    found, factor = scaled_frequencies(options.get("scaling"), dim, options["base"])
    places = sorted({round(n * (pairs - 1) / 8) for n in range(9)})
    near(found[places].astype(float), said["frequencies"], rtol=FREQUENCY)
    assert factor == pytest.approx(said["factor"], rel=1e-6)


# What config.json does not say: the rows of the table; and that tensors alone say whether the output
# layer is tied, where the library ties it whatever config.json says.
UNSAID = {"meta-llama/Llama-3.2-11B-Vision", "google/gemma-3-4b-it"}
BY_TENSORS = {"meta-llama/Llama-3.2-11B-Vision", "google/flan-t5-base"}


# Only tensors say whether DeBERTa has positions.
@pytest.mark.parametrize("repository", sorted(FACTS.keys() - {"microsoft/deberta-v3-base"}))
def test_a_published_config_is_read_as_the_library_reads_it(repository):
    facts, entries = FACTS[repository], CONFIGS[repository]
    has_stacks = entries.get("is_encoder_decoder") and "whisper" not in repository
    stack, (rows, table_width) = "decoder" if has_stacks else None, facts["table"]
    settings = {"vocab_size": rows} if repository in UNSAID else None
    found = te.pretrained.load_config(entries, stack=stack, settings=settings)
    config, output, scheme = found.config, found.config.output, found.config.scheme
    assert (config.vocab_size, config.table_width) == (rows, table_width)
    assert config.factor == pytest.approx(facts["scale"])
    assert config.layer_norm_eps == facts["norm"]
    assert (scheme and [scheme.start, scheme.max_len]) == facts["positions"]
    if isinstance(output, te.OutputConfig):
        assert output.softcap == facts["softcap"]
        assert output.tied == facts["tied"] or repository in BY_TENSORS
    (buckets, distance), bias = facts["bias"], found.bias or {}
    assert bias.get("num_buckets") == buckets
    assert distance in (None, bias.get("max_distance"))
    rotations = {layer.type: layer.rotary for layer in found.layers if layer.rotary}
    for kind, said in facts["rotations"].items():
        assert_rotates(rotations.get(kind) or next(iter(rotations.values())), said)
    assert bool(rotations) == bool(facts["rotations"]) or "gpt-j" in repository


@pytest.mark.parametrize(
    ("repository", "message"),
    [
        ("jinaai/jina-embeddings-v2-base-en", "... only entries that can be read ... got position_embedding_type: 'alibi'"),
        ("Alibaba-NLP/gte-base-en-v1.5", "...rope_type: wanted one of ... got 'ntk'"),
        ("Alibaba-NLP/gte-multilingual-base", "...rope_type: wanted one of ... got 'ntk'"),
    ],
)  # fmt: skip
def test_model_whose_own_code_differs_is_refused(repository, message):
    with refused(ValueError, message):
        te.pretrained.load_config(CONFIGS[repository])


@pytest.mark.parametrize("case", V4, ids=[case["name"] for case in V4])
def test_layers_of_deepseek_v4_rotate_by_their_kind(case):
    """The sliding layers by one base, and the layers that see averages by another and a scaling."""
    entries = {"model_type": "deepseek_v4", "vocab_size": 12, "hidden_size": 16} | case["config"]
    found = te.pretrained.load_config(entries)
    assert [layer.type for layer in found.layers] == case["types"]
    for layer in found.layers:
        name = "main" if layer.type == "sliding_attention" else "compress"
        assert layer.rotary["layout"] == "interleaved"
        assert_rotates(layer.rotary, case["rotations"][name])
        assert layer.mask == {"causal": True, "window": (case["window"] - 1, 0)}


V4_LAYERS = {
    "model_type": "deepseek_v4",
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 3,
}
V4_REFUSED = {
    "te.pretrained.load_config(V4_LAYERS | {'compress_ratios': [4, 0]})": "ValueError: ... compress_ratios: wanted a value for each layer, 3, got 2",
    "te.pretrained.load_config(V4_LAYERS | {'compress_ratios': [4, 0, 8]})": "ValueError: ... compress_ratios: wanted some of 0, 4, 128, got 8",
    "te.pretrained.load_config(V4_LAYERS | {'rope_parameters': {'main': {'rope_theta': 5.0}}})": "ValueError: ... rope_parameters: wanted an object with the entries main and compress, got ",
    "te.pretrained.load_config({**V4_LAYERS, 'model_type': 'llama', 'compress_rope_theta': 5.0})": "ValueError: ... only entries that can be read ... got compress_rope_theta: 5.0",
}  # fmt: skip


def test_odd_layers_of_deepseek_v4_are_refused():
    each_raises(V4_REFUSED, globals())
