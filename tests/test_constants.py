"""A unit whose w is zero is a constant: it goes into the next bias where that is exact, and stays where it is not."""

import pytest
import torch
from torch import nn

from networks import Net, chain
from pathprox import find_units, shrink


def idle(layer: nn.Module, *units: int) -> None:
    """These units say their bias, and nothing else."""
    with torch.no_grad():
        layer.weight[list(units)] = 0


def check(model: nn.Module, x: torch.Tensor, **options) -> nn.Module:
    units = find_units(model, x, **options)
    small = shrink(model, units)
    other = torch.randn_like(x)
    torch.testing.assert_close(small(other), model(other), rtol=0, atol=1e-12)
    return small


def test_constants_go_into_the_next_bias():
    model = chain(4, 8, 6, 2).double()
    idle(model[0], 1, 3, 5)
    with torch.no_grad():
        model[0].bias[[1, 3]] = torch.tensor([0.7, -0.4]).double()  # one that ReLU lets through, one that it does not
    small = check(model, torch.randn(3, 4).double())
    assert small[0].out_features == 5
    assert not torch.equal(small[2].bias, model[2].bias)


def test_one_fold_can_lead_to_the_next():
    """The only inputs of the second layer's first unit are constants, so it is one itself."""
    model = chain(4, 8, 6, 2).double()
    idle(model[0], 0, 1)
    with torch.no_grad():
        model[0].bias[:2] = 0.5
        model[2].weight[0, 2:] = 0
    small = check(model, torch.randn(3, 4).double())
    assert [layer.out_features for layer in (small[0], small[2])] == [6, 5]


def test_a_layer_of_constants_leaves_a_working_network():
    model = chain(4, 8, 6, 2).double()
    idle(model[2], *range(6))
    small = check(model, torch.randn(3, 4).double())
    assert sum(p.numel() for p in small.parameters()) < 20


@pytest.mark.parametrize(
    ("options", "folds"),
    [
        ({"kernel_size": 1}, True),
        ({"kernel_size": 3}, True),
        ({"kernel_size": 3, "padding": "valid"}, True),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, True),
        ({"kernel_size": 3, "padding": 1}, False),  # at the border there are zeros beside the constant
        ({"kernel_size": 3, "padding": "same"}, False),
        ({"kernel_size": 3, "bias": False}, False),
    ],
)
def test_convolutions_fold_where_that_is_exact(options, folds):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, **options)).double()
    idle(model[0], 2, 4)
    with torch.no_grad():
        model[0].bias[[2, 4]] = 0.3
    small = check(model, torch.randn(2, 3, 10, 10).double())
    assert small[0].out_channels == (6 if folds else 8)


def test_a_constant_zero_needs_no_bias():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1, bias=False)).double()
    idle(model[0], 2)
    with torch.no_grad():
        model[0].bias[2] = -0.3
    assert check(model, torch.randn(2, 3, 10, 10).double())[0].out_channels == 7


def test_batch_norm_with_a_scale_of_zero_is_a_constant():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3)).double()
    with torch.no_grad():
        model[1].weight[:3] = 0
        model[1].bias[:3] = torch.tensor([0.5, 0.2, -0.1]).double()
    small = check(model.eval(), torch.randn(2, 3, 8, 8).double())
    assert small[0].out_channels == small[1].num_features == 5


def test_units_that_are_not_homogeneous_can_be_constants_too():
    model = nn.Sequential(nn.Linear(4, 8), nn.Sigmoid(), nn.Linear(8, 3)).double()
    idle(model[0], 0, 1)
    with torch.no_grad():
        model[0].bias[0] = 0  # sigmoid makes 1/2 of it
    assert check(model, torch.randn(2, 4).double(), homogeneous_only=False)[0].out_features == 6


def test_a_constant_behind_a_gate_is_none():
    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))

    model = Net(forward, gate=nn.Linear(4, 8), up=nn.Linear(4, 8), down=nn.Linear(8, 3)).double()
    idle(model.up, 0, 1)
    assert check(model, torch.randn(2, 4).double()).up.out_features == 8
    with torch.no_grad():
        model.gate.bias.fill_(1e4)  # saturated at these weights, not at others
    assert check(model, torch.randn(2, 4).double()).up.out_features == 8


def test_the_original_keeps_its_biases():
    model = chain(4, 8, 2).double()
    idle(model[0], 0)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    check(model, torch.randn(2, 4).double())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
