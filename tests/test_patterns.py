"""Patterns that break other tools, each with random dead sets: the small model is exact, or the reason is told."""

import copy
import warnings

import pytest
import torch
from torch import nn

import patterns
import patterns_gates
from networks import kill, numel
from pathprox import find_units, shrink

FUNCTIONS = {
    name: function
    for module in (patterns, patterns_gates)
    for name, function in vars(module).items()
    if getattr(function, "__module__", "") == module.__name__ and name[0] != "_"
}
GATE = "as a gate"
OUTPUT = "the model's output"
# What is told (of a layer that has no units, or a group that keeps its dead ones), and whether anything gets smaller:
# with homogeneous units alone, and with all removable ones.
PATTERNS = {
    "raw_input_in_the_stream": ("add joins the unit with something that is not one", True, True),
    "layer_norm_on_the_stream": ("layer_norm mixes all units", True, True),
    "grouped_query_attention": (GATE, True, True),
    "grouped_query_attention_with_norms_on_queries_and_keys": (GATE, True, True),
    "packed_attention": (GATE, True, True),
    "attention_whose_values_may_be_narrow": ("don't multiply up to the size", False, False),
    "linear_attention": ("don't multiply up to the size", False, False),
    "encoder_layer": ("self_attn -> self_attn.out_proj were kept: at the smaller size the model fails", True, True),
    "encoder_layer_with_gelu_and_norms_first": ("gelu is not homogeneous", False, True),
    "decoder_layer": ("is computed in the forward pass", True, True),
    "multihead_attention": ("attention -> attention.out_proj were kept", True, True),
    "group_norm": ("group_norm mixes the units of a group", True, True),
    "pixel_shuffle": (OUTPUT, True, True),
    "weight_norm": ("is computed in the forward pass", True, True),
    "linear_view_conv": (OUTPUT, True, True),
    "conv_flatten_linear": (OUTPUT, True, True),
    "channels_last_flatten": (OUTPUT, True, True),
    "u_net": (OUTPUT, True, True),
    "dense_net": ("batch norm", True, True),
    "squeeze_excitation": (GATE, True, True),
    "squeeze_excitation_with_swish": (GATE, False, True),
    "spatial_gate": (GATE, True, True),
    "inverted_residual": ("batch norm", True, True),
    "inverted_residual_with_swish": ("silu is not homogeneous", True, True),
    "pre_activation_res_net": ("running_mean should contain 6 elements", True, True),
    "recurrent": ("its parameters are used by gru", True, True),
    "lstm": ("its parameters are used by lstm", True, True),
    "shuffle_net": ("grouped convolution", True, True),
    "grouped_transposed_convolution": ("grouped convolution", True, True),
    "conv_next_block": ("gelu is not homogeneous", False, True),
    "gated": (GATE, True, True),
    "gated_by_relu": (GATE, True, True),
    "gated_and_packed": (GATE, True, True),
    "gated_convolution": (GATE, True, True),
    "tanh_times_sigmoid": ("tanh is not homogeneous", False, True),
    "scale_and_shift": (GATE, True, True),
    "maxout": (OUTPUT, True, True),
    "called_twice": ("is used 2 times", False, False),
    "tied_weights": ("is used 2 times", False, False),
    "cross_stage": ("at the smaller size the model fails (patterns.py", True, True),
    "halves": ("at the smaller size the model fails (patterns.py", True, True),
    "size_in_an_attribute": (OUTPUT, True, True),
    "literal_size": ("at the smaller size the model fails (patterns.py", True, True),
    "output_of_a_hidden_layer": (OUTPUT, True, True),
    "class_token": ("mixes the unit with something that is not one", True, True),
    "transposed_weights": (OUTPUT, True, True),
    "scale_in_another_shape": ("add of one number to all units", True, True),
    "written_in_place": ("the outputs changed by", False, False),
}


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    model, x = FUNCTIONS[name]()
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    return model, x.double()


@pytest.mark.parametrize("name", PATTERNS)
def test_it_is_exact_or_the_reason_is_told(name):
    reason, *outcomes = PATTERNS[name]
    model, x = make(name)
    own = copy.deepcopy(model.state_dict())
    told = ""
    for homogeneous_only, expected in zip((True, False), outcomes, strict=True):
        units = find_units(model, x, homogeneous_only=homogeneous_only)
        told += "\n".join(map(str, units.left_out))
        smaller = False
        for share in (0.3, 0.8):
            model.load_state_dict(own)
            kill(units, share)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                small = shrink(model, units)
            told += "\n".join(str(w.message) for w in caught)
            other = torch.randn_like(x)
            want, got = model(other).detach(), small(other).detach()
            assert (got - want).abs().max() <= 1e-10 * (1 + want.abs().max())
            small.train()(other).sum().backward()
            assert [type(m) for m in small.modules()] == [type(m) for m in model.modules()]
            smaller |= numel(small) < numel(model)
        assert smaller == expected
        model.load_state_dict(own)
    assert reason in told


def test_every_pattern_is_tried():
    assert set(FUNCTIONS) == set(PATTERNS)


def test_heads_go_with_their_queries_and_keys():
    model, x = make("packed_attention")
    units = find_units(model, x)
    (heads,) = units.bundles
    with torch.no_grad():
        for s in heads.out:
            s.scale_(model.proj.weight, torch.tensor([1.0, 0.0, 1.0, 0.0]).double())
    small = shrink(model, units)
    assert (small.num_heads, small.qkv.out_features, small.proj.in_features) == (2, 24, 8)
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-12)


def test_grouped_queries_share_columns_of_the_output_projection():
    model, x = make("grouped_query_attention")
    (group,) = find_units(model, x)
    (out,) = group.out
    assert len(group) == 12
    assert torch.equal(torch.bincount(out.owner), torch.full((12,), 2))


def test_values_get_narrower_in_every_head_alike():
    model, x = make("attention_whose_values_may_be_narrow")
    units = find_units(model, x)
    with torch.no_grad():
        model.o.weight[:, [0, 1, 2, 4, 7, 8, 9, 13]] = 0
    with pytest.warns(UserWarning, match="dead units of v -> o were kept"):
        small = shrink(model, units)
    assert (small.v.out_features, small.q.out_features) == (12, 16)
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-12)


def test_units_that_are_not_homogeneous_have_to_be_asked_for():
    model, x = make("encoder_layer_with_gelu_and_norms_first")
    assert all(group.homogeneous for group in find_units(model, x))
    units = find_units(model, x, homogeneous_only=False)
    assert [g.homogeneous for g in units] == [True, False]
    assert "group lasso on v" in str(units)


def test_a_gate_that_comes_first_is_still_the_gate():
    model, x = make("squeeze_excitation_with_swish")
    units = find_units(model, x, homogeneous_only=False)
    assert [g.layers_in for g in units] == [("conv",), ("down",)]
    assert units[0].layers_carried == ("up",)
