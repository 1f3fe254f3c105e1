"""What the decoder of notebook 08 reads of a checkpoint."""

import pytest
import whole_models
from checkpoints import table

ENTRIES = {"model_type": "llama", "num_attention_heads": 2, "num_hidden_layers": 2}


def test_a_tensor_of_an_expert_is_not_read_as_that_of_a_layer(tmp_path, monkeypatch):
    names = whole_models.notebook().load.__globals__
    # Without what is added for models with experts.
    roles = {end: role for end, role in names["ROLES"].items() if role}
    monkeypatch.setitem(names, "ROLES", roles)
    expert = "model.layers.0.mlp.experts.1.gate_proj.weight"
    table(tmp_path, ENTRIES, "model.embed_tokens.weight", expert)
    with pytest.raises(ValueError, match=rf"^{expert}: no entry of ROLES"):
        names["load"](tmp_path)
