"""Shrinking keeps the function, the classes and the original; what cannot be rebuilt smaller is kept and told."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathprox
from networks import Net, attached, batch, chain, kill, numel, train
from pathprox import find_units, shrink
from pathprox.experiments.models import MLP, VGG
from test_random_networks import Builder


def check(model: nn.Module, x: torch.Tensor, share: float = 0.5, **options) -> nn.Module:
    """Shrink after killing, in float64 and float32; compare on other inputs than the example."""
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.4)
    units = find_units(model, x, **options)
    kill(units, share)
    before = copy.deepcopy(model)
    small = shrink(model, units)
    for (name, old), new in zip(before.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(old, new), name
    assert [type(m) for m in small.modules()] == [type(m) for m in model.modules()]
    other = torch.randn_like(x.double())
    assert (small(other) - model(other)).abs().max() <= 1e-10 * (1 + model(other).abs().max())
    return small


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (chain(8, 30, 20, 4), (8,)),
        (MLP(3, 40, factorized=True, inputs=8), (8,)),
        (VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "A")), (3, 32, 32)),
        (VGG((8, 8, "M", 12, 12, "M", 16, 16, "M", 16, 16, "M", 16, 16, "A"), batch_norm=True), (3, 32, 32)),
        (nn.Sequential(nn.Conv2d(1, 6, 3), nn.PReLU(6), nn.Flatten(), nn.Linear(6 * 36, 5)), (1, 8, 8)),
        (nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2)), (3, 5, 5)),
    ],
    ids=["chain", "factorized", "vgg", "vgg-bn", "flatten", "transposed"],
)
def test_shrinking_keeps_the_function(model, shape):
    model = copy.deepcopy(model)
    full = numel(model)
    assert numel(check(model, torch.randn(2, *shape))) < full


def test_the_attributes_say_the_new_size():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.PReLU(8), nn.Flatten(), nn.Linear(8 * 16, 4))
    small = check(model, torch.randn(2, 3, 6, 6))
    kept = len(small[1].weight)
    assert 0 < kept < 8
    assert small[0].out_channels == small[0].weight.shape[0] == len(small[0].bias) == kept
    assert small[1].num_features == len(small[1].running_mean) == len(small[1].running_var) == kept
    assert small[2].num_parameters == kept
    assert small[4].in_features == small[4].weight.shape[1] == kept * 16
    assert f"Conv2d(3, {kept}, " in repr(small)


def test_units_without_listeners_die_too():
    """The last hidden layer is all dead but one unit, which hears only one of the layer before."""
    model = chain(4, 8, 6, 2)
    with torch.no_grad():
        model[4].weight[:, 1:] = 0
        model[2].weight[0, 1:] = 0
    small = shrink(model, find_units(model, torch.randn(1, 4)))
    assert [layer.out_features for layer in small if isinstance(layer, nn.Linear)] == [1, 1, 2]


def test_a_dead_layer_leaves_a_working_network():
    model = chain(4, 8, 6, 2)
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    x = torch.randn(5, 4)
    small = shrink(model, find_units(model, x[:1]))
    torch.testing.assert_close(small(x), model(x))
    assert numel(small) < 20


def test_residual_streams_lose_channels_where_all_writers_and_readers_agree():
    def forward(self, x):
        x = torch.relu(self.stem(x))
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x)

    blocks = nn.ModuleList(chain(10, 12, 10) for _ in range(3))
    model = Net(forward, stem=nn.Linear(4, 10), blocks=blocks, head=nn.Linear(10, 2))
    small = check(model, torch.randn(3, 4))
    assert small.stem.out_features == small.head.in_features == small.blocks[1][2].out_features < 10


def test_depthwise_convolutions_lose_whole_groups():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    units = find_units(model, torch.randn(1, 3, 6, 6))
    with torch.no_grad():
        model[2].weight[:3] = 0
    small = shrink(model, units)
    assert (small[0].out_channels, small[2].groups, small[2].in_channels, small[4].in_channels) == (5, 5, 5, 5)
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(small(x), model(x))


def test_grouped_convolutions_that_do_not_lose_whole_groups_are_kept_and_told():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 4, 1))
    units = find_units(model, torch.randn(1, 3, 6, 6))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 0
    with pytest.warns(UserWarning, match="dead units of 0 -> 2 were kept: .*grouped convolution"):
        small = shrink(model, units)
    assert small[0].out_channels == 8


@pytest.mark.parametrize(("dead", "left"), [(0, 64), (3, 64), (8, 56), (30, 40), (63, 8), (64, 8)])
def test_a_multiple_of_units_is_left(dead, left):
    model = chain(8, 64, 4)
    units = find_units(model, torch.randn(1, 8))
    with torch.no_grad():
        model[2].weight[:, torch.randperm(64)[:dead]] = 0
    small = shrink(model, units, multiple_of=8)  # warnings are errors: no unit is said to be kept against the wish
    assert small[0].out_features == small[2].in_features == left
    x = torch.randn(5, 8)
    torch.testing.assert_close(small(x), model(x))


def test_a_multiple_is_left_in_every_group_of_a_convolution():
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 3, groups=2), nn.ReLU(), nn.Conv2d(8, 4, 1))
    units = find_units(model, torch.randn(1, 3, 6, 6))
    with torch.no_grad():
        for unit in (0, 1, 2, 3, 8, 9, 10, 11, 12, 13):  # four of the first eight, six of the others
            model[0].weight[unit] = model[0].bias[unit] = 0
    with pytest.warns(UserWarning, match="dead units of 0 -> 2 were kept"):
        small = shrink(model, units, multiple_of=4)
    assert (small[0].out_channels, small[2].groups) == (8, 2)
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(small(x), model(x))
    with pytest.raises(ValueError, match="multiple_of must be a whole number, 1 or more, got 0"):
        shrink(model, units, multiple_of=0)


def test_a_literal_size_keeps_its_group_and_names_the_line():
    def forward(self, x):
        h = torch.relu(self.a(x)).view(-1, 8)
        return self.c(torch.relu(self.b(h)))

    model = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 6), c=nn.Linear(6, 2))
    units = find_units(model, torch.randn(8, 4))
    with torch.no_grad():
        model.b.weight[:, :4] = 0
        model.c.weight[:, :3] = 0
    with pytest.warns(UserWarning, match=r"dead units of a -> b were kept: .*test_shrink\.py:\d+"):
        small = shrink(model, units)
    assert (small.a.out_features, small.b.out_features) == (8, 3)
    x = torch.randn(8, 4)
    torch.testing.assert_close(small(x), model(x))


def test_concatenated_and_padded_channels():
    def forward(self, x):
        a, b = torch.relu(self.a(x)), torch.relu(self.b(x))
        return self.c(F.max_pool2d(torch.cat([a, x, b], 1), 2))

    model = Net(forward, a=nn.Conv2d(2, 6, 3, padding=1), b=nn.Conv2d(2, 5, 3, padding=1), c=nn.Conv2d(13, 3, 1))
    small = check(model, torch.randn(2, 2, 6, 6))
    assert small.c.in_channels == small.a.out_channels + 2 + small.b.out_channels < 13


def test_what_pathprox_trained_becomes_smaller():
    model, data = chain(8, 64, 4), batch()
    optimizer, prox = attached(model, data[0], lambda p: torch.optim.SGD(p, lr=0.1), 0.03)
    train(model, optimizer, data, 400)
    alive, count = prox.units.count_active()
    small = shrink(model, prox.units)
    assert small[0].out_features == alive < count
    torch.testing.assert_close(small(data[0]), model(data[0]), rtol=1e-5, atol=1e-5)


def test_frozen_parameters_and_modes_are_kept():
    model = chain(4, 8, 2).train()
    model[0].bias.requires_grad_(False)
    units = find_units(model, torch.randn(1, 4))
    kill(units)
    small = shrink(model, units)
    assert [p.requires_grad for p in small.parameters()] == [True, False, True, True]
    assert small.training
    assert model.training


def test_units_of_another_model_are_refused():
    model = chain(4, 8, 2)
    with pytest.raises(ValueError, match="found in another model"):
        shrink(copy.deepcopy(model), find_units(model, torch.randn(1, 4)))


@pytest.mark.parametrize("part", range(4))
def test_random_networks_shrink_exactly(part):
    smaller = 0
    for seed in range(1000 + part * 15, 1000 + (part + 1) * 15):
        torch.manual_seed(seed)
        model, x = Builder(seed).build()
        full = numel(model)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "dead units of .* grouped convolution")  # told, and right
            smaller += numel(check(model, x, homogeneous_only=seed % 2 == 0)) < full
    assert smaller >= 8
    assert pathprox.shrink is shrink


def test_tf32_is_off_while_a_removal_is_tried_and_as_it_was_afterwards():
    seen = set()

    def forward(self, x):
        seen.add(torch.backends.cuda.matmul.fp32_precision)
        return self.b(torch.relu(self.a(x)))

    model, x = Net(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 3)), torch.randn(2, 4)
    units = find_units(model, x)
    with torch.no_grad():
        model.b.weight[:, :3] = 0
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        seen.clear()
        assert shrink(model, units).a.out_features == 5
        assert "ieee" in seen
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
