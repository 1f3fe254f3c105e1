"""Masks for images, as the page makes them from `found.layers`, against the masks of transformers."""

import re

import numpy as np
import pytest
from checkpoints import GOLDEN, golden
from compare import equal

import transformer_embed as te

FILE = golden("image_masks.json")
PAGE = (GOLDEN.parents[1] / "notebooks" / "published_models.md").read_text()
IMAGES, IS_TOKEN = np.array(FILE["images"]), np.array(FILE["tokens"], bool)
SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
ROTATIONS = {
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
}


def image_mask():
    """The function of the page."""
    names = {"te": te}
    (block,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "image_mask" in code
    )
    exec(block, names)
    return names["image_mask"]


def image_ids():
    """The number of the image that each token is of; -1: text."""
    starts = (IMAGES == 1) & (np.roll(IMAGES, 1, 1) != 1)
    starts[:, 0] = IMAGES[:, 0] == 1
    return np.where(IMAGES == 1, np.cumsum(starts, 1) - 1, -1)


@pytest.mark.parametrize("name", FILE["cases"])
def test_tokens_of_an_image_see_each_other_as_in_transformers(name):
    case = FILE["cases"][name]
    found = te.pretrained.load_config(SMALL | ROTATIONS | case["config"])
    tokens = te.TokenPositions.from_ids(IS_TOKEN.astype(int), pad_id=0)
    pairs = IS_TOKEN[:, :, None] & IS_TOKEN[:, None]
    for layer in found.layers:
        theirs = np.array([list(map(int, row)) for row in case[layer.type]], bool)
        ours = np.asarray(image_mask()(layer, tokens, image_ids()).dense())[:, 0]
        equal(ours & pairs, theirs.reshape(pairs.shape) & pairs)


def test_small_gemma_4_masks_images_like_text():
    case = FILE["cases"]["gemma4"]["config"] | {"use_bidirectional_attention": None}
    found = te.pretrained.load_config(SMALL | ROTATIONS | case)
    assert [layer.image_blocks for layer in found.layers] == [None, None]
