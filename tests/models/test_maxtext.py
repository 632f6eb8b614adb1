"""Trees of the authors' MaxText training code as models of ours."""

import re

import numpy as np
import pytest
import torch
from maxtext_by_hand import D, E, N, V, logits, nested, tree

from dcformer import DCFormerConfig, DCFormerForCausalLM
from dcformer.models.maxtext import flattened, state_dict_from_maxtext

SHAPE = {"vocab_size": V, "hidden_size": E, "num_attention_heads": N, "head_dim": D, "intermediate_size": 40}
WINDOWS = {"G": [None], "LG": [3, None], "LGL6": [3, None] + [3] * 6}


def model(layers, pattern="LG", **overrides):
    options = {"num_hidden_layers": layers, "window_pattern": pattern, "sliding_window": 3, "qk_norm": True} | overrides
    return DCFormerForCausalLM(DCFormerConfig(**SHAPE | options)).eval()


def converted(parameters, model):
    model.load_state_dict(state_dict_from_maxtext(parameters, model))
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("pattern", "blocks", "drawn", "configured"),
    [
        ("LG", 2, {}, {}),
        ("LGL6", 1, {}, {}),
        ("G", 3, {"groups": 2, "qk_norm": False}, {"compose": {"groups": 2}, "qk_norm": False}),
        ("LG", 2, {"mgate": 4}, {"mgate_dim": 4}),
        ("LG", 1, {"static": True, "kv_heads": 2}, {"compose": {"static": True}, "num_key_value_heads": 2}),
    ],
)
def test_logits_are_those_of_their_model(pattern, blocks, drawn, configured):
    period = len(WINDOWS[pattern])
    parameters, ids = tree(blocks, period, **drawn), torch.randint(V, (2, 9))
    ours = converted(parameters, model(blocks * period, pattern, **configured))
    expected = logits(parameters, ids, WINDOWS[pattern], eps=1e-6)
    torch.testing.assert_close(ours(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_block_may_hold_several_turns_of_the_pattern():
    parameters, ids = tree(1, 4), torch.randint(V, (1, 9))
    with torch.no_grad():
        ours = converted(parameters, model(4))(ids).logits
    torch.testing.assert_close(ours, logits(parameters, ids, WINDOWS["LG"] * 2, eps=1e-6), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("layers", "pattern", "named"),
    [
        (5, "LG", "num_hidden_layers=5 must be a multiple of 2"),
        (4, "LGLL", "window_pattern='LGLL' must repeat after 2 layers"),
        (6, "LG", r"pre_self_attention_layer_norm_1.scale has shape [24, 2] in place of [24, 3]"),
    ],
)
def test_layers_that_do_not_fit_the_blocks_are_refused(layers, pattern, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        state_dict_from_maxtext(tree(2, 2), model(layers, pattern))


def test_everything_missing_and_unknown_is_named():
    parameters = tree(2, 2, mgate=4)
    del parameters["decoder.decoder_norm.scale"], parameters["decoder.layers.self_attention_1.out.kernel"]
    with pytest.raises(ValueError) as error:
        state_dict_from_maxtext(parameters, model(4))
    assert str(error.value) == (
        "the MaxText tree does not fit the configuration: decoder.decoder_norm.scale is missing; "
        "decoder.layers.self_attention_1.out.kernel is missing; decoder.layers.mlp_0.mgate.kernel is unknown; "
        "decoder.layers.mlp_1.mgate.kernel is unknown"
    )


def test_every_wrong_shape_is_named():
    parameters = tree(2, 2)
    parameters["token_embedder.embedding"] = parameters["token_embedder.embedding"].T
    query = "decoder.layers.self_attention_0.query.kernel"
    parameters[query] = parameters[query].transpose(1, 0, 2, 3)
    with pytest.raises(ValueError) as error:
        state_dict_from_maxtext(parameters, model(4))
    assert str(error.value) == (
        "the MaxText tree does not fit the configuration: token_embedder.embedding has shape [24, 31] in place of [31, 24]; "
        "decoder.layers.self_attention_0.query.kernel has shape [2, 24, 4, 8] in place of [24, 2, 4, 8]"
    )


def test_models_that_no_tree_can_be_are_refused():
    with pytest.raises(ValueError, match="tie_word_embeddings=True must be False"):
        state_dict_from_maxtext(tree(2, 2), model(4, tie_word_embeddings=True))


def test_every_number_arrives_once():
    parameters = tree(2, 2)
    state = state_dict_from_maxtext(parameters, model(4))
    theirs = np.sort(np.concatenate([array.ravel() for array in parameters.values()]))
    ours = torch.cat([tensor.flatten() for tensor in state.values()]).sort().values
    assert torch.equal(ours, torch.from_numpy(theirs))
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_the_widest_dtype_is_taken():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="the extra maxtext is not installed")
    parameters = tree(1, 2)
    qkw = "decoder.layers.self_attention_0.AttentionOp_0.dyn_w_proj.qkw"  # their code keeps it in bfloat16
    parameters[qkw] = parameters[qkw].astype(ml_dtypes.bfloat16)
    state = state_dict_from_maxtext(parameters, model(2))
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    loaded = state["model.layers.0.self_attn.compose.dynamic.qkw"]
    assert torch.equal(loaded, torch.tensor(parameters[qkw].astype(np.float32))[:, 0])


def test_flattened_gives_dotted_names():
    parameters = tree(1, 2)
    assert flattened(nested(parameters)) == parameters
