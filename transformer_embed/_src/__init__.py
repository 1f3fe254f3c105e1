"""Holds the private half of the package, in folders that import only from the folders below them.

To depend on the package, read the core: `sequences`, `attention`, `positions`, `tokens` and
`layers`, in this order. `rows` builds on the core. `pretrained`, `kernels`, `plots` and the command
line use what a user has, and can be read on their own.

An id enters in `layers/embedder.py`. `layers/embed.py` looks up the table row of the id by
`tokens/lookup.py`, adds the encoding of the position from `positions/`, and applies
`tokens/dropout.py`. Your layers come next. `tokens/losses.py` takes the result and an output layer,
and computes the loss of one chunk of tokens after another (`tokens/chunks.py`).

The gradient of the logits is computed with the sum of the losses, in `tokens/loss_sums.py`. (If a
loss returns a value for each token, `tokens/loss_values.py` computes this gradient.) The gradient
of a tied table has two parts. One comes from the loss. The other comes from
`tokens/lookup_gradient.py`, which adds up the gradients of repeated ids. In a row-wise step,
`rows/value_and_grad.py` takes the gradient of the batch's table rows, `rows/apply_gradients.py`
runs the optimizer, and `rows/update_tables.py` writes the new rows.

A mask begins as `sequences/token_positions.py`, the positions and segments of tokens.
`attention/attention_rule.py` says which tokens a query may attend to. `attention/attention_mask.py`
makes the array or a tile of the array. `attention/tile_kinds.py` says which tiles are False
throughout, so that a kernel can skip these tiles. `kernels/` turns the rule into the arguments of a
fused kernel.
"""
