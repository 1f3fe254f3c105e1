"""What an input layer computes, in float64."""

import numpy as np
import oracle

import transformer_embed as te


def formula(found, ids, token_types=None):
    """The embeddings of ids by what `load_embedder` found."""
    config, ids, scheme = found.config, np.asarray(ids), found.config.scheme
    given = {
        f"{module.rsplit('/', 1)[-1]}/{name}": np.asarray(leaf).astype(np.float64)
        for module, leaves in found.params.items()
        for name, leaf in leaves.items()
    }
    scale = np.sqrt(config.table_width) if config.scale is True else config.scale or 1
    x = given["token_embedding/embeddings"][ids] * scale
    if config.pad_id is not None:
        x[ids == config.pad_id] = 0
    if scheme is not None:
        pad_id = config.pad_id if scheme.pad_id is None else scheme.pad_id
        tokens = np.ones(ids.shape, bool) if pad_id is None else ids != pad_id
        at_padding = scheme.start if scheme.at_padding is None else scheme.at_padding
        positions = np.where(tokens, np.cumsum(tokens, -1) - 1 + scheme.start, at_padding)
        if isinstance(scheme, te.Learned):
            x = x + given["learned_positional_encoding/embeddings"][positions]
        else:
            names = ("base", "layout", "shift", "odd", "frequency_scale")
            constants = {name: getattr(scheme, name) for name in names}
            rows = {
                position: [float(c) for c in oracle.encoding(position, x.shape[-1], **constants)]
                for position in np.unique(positions).tolist()
            }
            x = x + np.array([rows[each] for each in positions.ravel().tolist()]).reshape(x.shape)
    if config.num_token_types is not None:
        types = np.zeros(ids.shape, int) if token_types is None else np.asarray(token_types)
        x = x + given["token_type_embedding/embeddings"][types]
    if config.layer_norm_eps is not None:
        centred = x - x.mean(-1, keepdims=True)
        x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
        x = x * given["layer_norm/scale"] + given.get("layer_norm/offset", 0)
    if config.embedding_width is not None:
        x = x @ given["widen/w"] + given["widen/b"]
    return x
