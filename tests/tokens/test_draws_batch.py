"""Draws of batches with tokens that are theirs or another's: what `te.check_batch` lets pass."""

import batches
import draws
import pytest

SPACE = {
    "kind": ["padded", "ended"],
    "tokens": [
        batches.MAKE["padded"],
        "T.from_segment_ids(T.from_ids(x[0], pad_id=0).positions)",
        "T.from_positions(T.from_ids(x[0], pad_id=0).positions)",
        "T.from_ids(np.roll(x[0], 1, 1), pad_id=0)",
        "T.from_ids(x[0][:, ::-1], pad_id=0)",
        "T.from_ids(x[0][::-1], pad_id=0)",
        "T.from_ids(x[0], pad_id=1)",
        "T.from_ids(x[0], pad_id=0).take([*range(12)][::-1])",
        "T.from_lengths((x[0] != 0).sum(1), 12)",
    ],
}
PROGRAM = """\
import batches, numpy as np, transformer_embed as te
T, x = te.TokenPositions, batches.arrays({kind!r}, {seed})
tokens = {tokens}
check = lambda: te.check_batch(x[0], tokens, vocab_size=9, pad_id=0)
fits = np.array_equal(x[0] != 0, tokens.padding_mask)
"""


@pytest.mark.parametrize("number", draws.numbers(40))
def test_a_batch_passes_if_padding_and_its_id_agree(number):
    chosen = draws.choices(number, SPACE)
    program = PROGRAM.format(**vars(chosen), seed=number)
    with draws.repeated_by(number, program):
        ran = draws.run(number, program)
        if ran.fits:
            ran.check()
        else:
            with pytest.raises(ValueError, match=r"^ids: wanted pad_id, 0, at padding and nowhere"):
                ran.check()
