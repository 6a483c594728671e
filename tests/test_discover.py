"""Units are found where they are, refused with a true reason where they are not, and never wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathprox
from networks import Net, chain
from pathprox import find_units
from pathprox.discover.labels import NONE, ZERO, Book
from pathprox.experiments.models import MLP, VGG


def names(groups) -> list[str]:
    return [g.name for g in groups]


def reasons(units) -> dict[str, str]:
    return {x.layer: str(x) for x in units.left_out}


def test_the_papers_pairs_come_out():
    units = find_units(MLP(3, 20, factorized=True), torch.randn(1, 784))
    assert len(units) == 5
    assert names(units.couplings) == ["layers.0 -> layers.1", "layers.2 -> layers.3", "layers.4 -> layers.5"]
    units = find_units(MLP(6, 20), torch.randn(1, 1, 28, 28))
    assert names(units.couplings) == ["layers.0 -> layers.1", "layers.2 -> layers.3", "layers.4 -> layers.5"]
    units = find_units(MLP(3, 20), torch.randn(1, 784))  # Task 5's plain network: three layers, the last is left over
    assert names(units.couplings) == ["layers.0 -> layers.1"]
    assert [s.name for s in units.others()] == ["layers.2.weight"]


def test_vgg19_pairs_its_convolutions_across_pooling_and_leaves_the_linear_layer():
    units = find_units(VGG(), torch.randn(1, 3, 32, 32))
    convolutions = [f"features.{i}" for i, m in enumerate(VGG().features) if isinstance(m, nn.Conv2d)]
    assert names(units.couplings) == [f"{a} -> {b}" for a, b in zip(convolutions[::2], convolutions[1::2], strict=True)]
    assert [s.name for s in units.others()] == ["classifier.weight"]
    assert len(units.chains) == 1


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (lambda b: nn.Linear(5, 7, bias=b), nn.Linear(7, 3), (5,)),
        (lambda b: nn.Conv1d(5, 7, 3, bias=b), nn.Conv1d(7, 3, 2), (5, 12)),
        (lambda b: nn.Conv2d(5, 7, 3, bias=b, stride=2), nn.Conv2d(7, 3, 2), (5, 12, 12)),
        (lambda b: nn.Conv3d(5, 7, 3, bias=b), nn.Conv3d(7, 3, 2, padding=1), (5, 6, 6, 6)),
        (lambda b: nn.ConvTranspose1d(5, 7, 3, bias=b), nn.ConvTranspose1d(7, 3, 2), (5, 12)),
        (lambda b: nn.ConvTranspose2d(5, 7, 3, bias=b, stride=2), nn.Conv2d(7, 3, 2), (5, 6, 6)),
        (lambda b: nn.ConvTranspose3d(5, 7, 2, bias=b), nn.ConvTranspose3d(7, 3, 2), (5, 4, 4, 4)),
    ],
)
def test_every_kind_of_layer(first, second, shape, bias):
    model = nn.Sequential(first(bias), nn.ReLU(), second)
    units = find_units(model, torch.randn(2, *shape))
    assert names(units) == ["0 -> 2"]
    assert len(units[0]) == 7
    assert len(units[0].bias) == bias
    torch.testing.assert_close(units.norm(units[0].into), rows_of(model[0]).double().norm(dim=1))
    torch.testing.assert_close(units.norm(units[0].out), columns_of(model[2]).double().norm(dim=1))


def rows_of(layer):
    dim = 1 if "Transpose" in type(layer).__name__ else 0
    return layer.weight.detach().movedim(dim, 0).flatten(1)


def columns_of(layer):
    dim = 0 if "Transpose" in type(layer).__name__ else 1
    return layer.weight.detach().movedim(dim, 0).flatten(1)


@pytest.mark.parametrize(
    "between",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.1),
        nn.PReLU(),
        nn.PReLU(6),
        nn.Identity(),
        nn.Dropout(0.3),
        nn.Dropout2d(0.3),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2, padding=1),
        nn.AdaptiveAvgPool2d(4),
        nn.AdaptiveMaxPool2d(4),
        nn.ZeroPad2d(1),
        nn.ReflectionPad2d(1),
        nn.ReplicationPad2d(1),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(3, 1), nn.Dropout(), nn.LeakyReLU()),
    ],
    ids=str,
)
def test_homogeneous_operators_let_units_through(between):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), between, nn.Conv2d(6, 4, 3))
    units = find_units(model, torch.randn(2, 3, 10, 10))
    assert [len(g) for g in units] == [6]
    assert len(units[0].carried) == (isinstance(between, nn.PReLU) and between.num_parameters > 1)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (nn.GELU(), "gelu is not homogeneous"),
        (nn.SiLU(), "silu is not homogeneous"),
        (nn.Sigmoid(), "sigmoid is not homogeneous"),
        (nn.ReLU6(), "hardtanh is not homogeneous"),
        (nn.LayerNorm([6, 8, 8]), "layer_norm mixes all units"),
        (nn.GroupNorm(2, 6), "group_norm mixes the units of a group"),
        (nn.BatchNorm2d(6, affine=False), "takes the unit's scale away"),
        (nn.Softmax(1), "softmax is not homogeneous"),
        (nn.ConstantPad2d(1, 2.0), "padding with 2.0"),
        (Net(lambda self, x: x + 1), "constant"),
        (Net(lambda self, x: x * x), "by itself"),
        (Net(lambda self, x: 1 / x), "not homogeneous"),
        (Net(lambda self, x: x.long().double()), "whole numbers"),
        (Net(lambda self, x: torch.fft.fft(x).real), "not known to keep"),
    ],
    ids=str,
)
def test_other_operators_end_them_with_a_reason(between, words):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), between, nn.Conv2d(6, 4, 3))
    units = find_units(model, torch.randn(2, 3, 10, 10))
    assert len(units) == 0
    assert words in reasons(units)["0"]
    assert "it is the model's output" in reasons(units)["2"]


def test_a_reason_names_the_line_of_the_users_file():
    def forward(self, x):
        return self.b(torch.sin(self.a(x)))

    units = find_units(Net(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 2)), torch.randn(1, 4))
    assert "sin is not homogeneous (test_discover.py:" in reasons(units)["a"]


def test_conv_flatten_linear_gives_each_channel_its_block_of_columns():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    units = find_units(model, torch.randn(1, 1, 8, 8))
    assert units[0].out[0].owner.tolist() == [i // 36 for i in range(144)]


def test_channels_last_flattening_comes_out_right():
    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))

    units = find_units(Net(forward, conv=nn.Conv2d(1, 4, 3), fc=nn.Linear(4 * 36, 5)), torch.randn(1, 1, 8, 8))
    assert units[0].out[0].owner.tolist() == [i % 4 for i in range(144)]


def test_linear_view_conv_makes_one_unit_of_many_rows():
    def forward(self, x):
        return self.conv(torch.relu(self.fc(x)).view(-1, 3, 4, 4))

    units = find_units(Net(forward, fc=nn.Linear(5, 48), conv=nn.Conv2d(3, 2, 3)), torch.randn(2, 5))
    assert [len(g) for g in units] == [3]
    assert units[0].into[0].owner.tolist() == [i // 16 for i in range(48)]


def test_batch_norm_starts_the_unit_anew_and_carries_the_convolution():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    units = find_units(model, torch.randn(2, 3, 8, 8))
    assert names(units) == ["1 -> 3"]
    assert {s.name for s in units[0].carried} == {"0.weight", "0.bias", "1.running_mean", "1.running_var"}
    assert [s.name for s in units[0].bias] == ["1.bias"]


def test_skip_connections_leave_the_units_inside_the_block():
    class Block(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()

        def forward(self, x):
            return torch.relu(x + self.b(torch.relu(self.norm(self.a(x)))))

    for norm in (False, True):
        model = nn.Sequential(Block(norm), Block(norm))
        units = find_units(model, torch.randn(2, 4, 6, 6))
        first = "norm" if norm else "a"
        assert names(units.couplings) == [f"0.{first} -> 0.b", f"1.{first} -> 1.b"]
        assert not units.chains  # a join between the blocks: nothing to balance
        assert "add joins the unit" in reasons(units)["0.b"]


def test_a_residual_stream_is_one_group_where_every_writer_and_reader_allows_it():
    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(x + self.b(torch.relu(self.a(x))))

    model = Net(forward, stem=nn.Linear(5, 7), a=nn.Linear(7, 9), b=nn.Linear(9, 7), head=nn.Linear(7, 2))
    units = find_units(model, torch.randn(1, 5))
    assert names(units) == ["stem, b -> a, head", "a -> b"]
    assert names(units.couplings) == ["a -> b"] or names(units.couplings) == ["stem, b -> a, head"]


def test_one_layer_feeding_two_has_both_as_output():
    model = Net(
        lambda self, x: self.b(h := torch.relu(self.a(x))) + self.c(h),
        a=nn.Linear(4, 6),
        b=nn.Linear(6, 3),
        c=nn.Linear(6, 3),
    )
    units = find_units(model, torch.randn(1, 4))
    assert names(units) == ["a -> b, c"]


def test_couplings_prefer_many_pairs_over_one_that_blocks_them():
    """a feeds b and c, and each feeds a layer of its own: two couplings, not one."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.d(torch.relu(self.b(h))), self.e(torch.relu(self.c(h)))

    layers = {"a": (4, 6), "b": (6, 5), "c": (6, 5), "d": (5, 2), "e": (5, 2)}
    units = find_units(Net(forward, **{k: nn.Linear(*v) for k, v in layers.items()}), torch.randn(1, 4))
    assert names(units) == ["a -> b, c", "b -> d", "c -> e"]
    assert names(units.couplings) == ["b -> d", "c -> e"]


def test_a_parameter_added_is_a_bias_and_one_multiplied_is_carried():
    def forward(self, x):
        return self.b(torch.relu(self.a(x) * self.scale + self.shift) * self.gain)

    model = Net(
        forward,
        a=nn.Linear(4, 6, bias=False),
        b=nn.Linear(6, 2),
        scale=nn.Parameter(torch.rand(6)),
        shift=nn.Parameter(torch.rand(6)),
    )
    model.gain = nn.Parameter(torch.tensor(2.0))
    units = find_units(model, torch.randn(1, 4))
    assert [s.name for s in units[0].bias] == ["shift"]
    assert [s.name for s in units[0].carried] == ["scale"]


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda self, x: self.b(torch.relu(self.a(torch.relu(self.a(x))))), "a.weight is used 2 times"),
        (lambda self, x: self.b(torch.relu(self.a(x))) + self.a.weight.sum(), "a.weight is also used by sum"),
        (lambda self, x: self.b(torch.relu(F.linear(x, self.a.weight.abs()))), "computed in the forward pass"),
    ],
)
def test_a_weight_used_in_another_way_is_refused(forward, words):
    units = find_units(Net(forward, a=nn.Linear(4, 4, bias=False), b=nn.Linear(4, 2)), torch.randn(2, 4))
    assert len(units) == 0
    assert words in " ".join(reasons(units).values())


def test_tied_weights_are_refused():
    model = Net(lambda self, x: self.b(torch.relu(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    model.b.weight = model.a.weight
    units = find_units(model, torch.randn(2, 4))
    assert len(units) == 0
    assert any("a.weight is used 2 times" in x.reason for x in units.left_out)


def test_weight_norm_is_refused_with_its_reason():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 2))
    units = find_units(model, torch.randn(1, 4))
    assert "computed in the forward pass" in reasons(units)["0"]


def test_a_head_that_exists_in_training_only_is_seen_by_the_proof():
    """The evaluation graph shows units; in training mode they feed another output, which rescaling would change."""

    def forward(self, x):
        h = torch.relu(self.a(x))
        return (self.b(h), h.sum(1)) if self.training else self.b(h)

    units = find_units(Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2)), torch.randn(2, 4))
    assert len(units) == 0
    assert "changed the outputs" in reasons(units)["a"]
    assert "in training mode" in reasons(units)["a"]


def test_a_wrong_rule_does_not_get_past_the_proof(monkeypatch):
    """Tell the engine that tanh is homogeneous: the proof refuses the group and keeps the right one."""
    from pathprox.discover import operators

    monkeypatch.setitem(operators.RULES, "tanh", operators.RULES["relu"])
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    units = find_units(model, torch.randn(3, 4))
    assert names(units) == ["2 -> 4"]
    assert "failed the proof: rescaling its units changed the outputs" in reasons(units)["0"]


def test_dead_units_and_zero_examples_do_not_blind_the_proof():
    model = chain(4, 6, 2)
    nn.init.zeros_(model[2].weight)
    assert names(find_units(model, torch.zeros(1, 4))) == ["0 -> 2"]


def test_what_no_gradient_reaches_is_not_believed():
    class Detached(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(4, 2)

        def forward(self, x):
            return self.c(x) + 0 * self.b(torch.relu(self.a(x)))

    units = find_units(Detached(), torch.randn(2, 4))
    assert len(units) == 0
    assert "no gradient of the outputs reaches its weights" in reasons(units)["a"]


def test_the_model_and_the_random_state_are_left_as_they_were():
    model = VGG((4, "M", 6, "M", 6, "M", 6, "M", 6, "M"), batch_norm=True).train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    find_units(model, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_exclude_leaves_layers_out_and_says_so():
    model = chain(4, 8, 7, 6, 2)
    units = find_units(model, torch.randn(1, 4), exclude=["2"])
    assert names(units) == ["4 -> 6"]
    assert "excluded by exclude='2'" in reasons(units)["0"]
    assert names(find_units(MLP(3, 8), torch.randn(1, 784), exclude="layers.[12]")) == []
    with pytest.raises(ValueError, match=r"names no module or parameter of the model\. Did you mean layers"):
        find_units(MLP(3, 8), torch.randn(1, 784), exclude=["layer"])


def test_inputs_may_be_a_tuple_or_keywords():
    model = Net(lambda self, x, y: self.b(torch.relu(self.a(x))) + y, a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    assert len(find_units(model, (torch.randn(1, 4), torch.randn(1, 2)))) == 1
    assert len(find_units(model, {"y": torch.randn(1, 2), "x": torch.randn(1, 4)})) == 1


def test_what_cannot_be_traced_says_why():
    branch = Net(lambda self, x: self.a(x) if x.sum() > 0 else x, a=nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"torch\.export cannot trace Net"):
        find_units(branch, torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"model\._orig_mod"):
        find_units(torch.compile(chain(4, 5, 2)), torch.randn(1, 4))
    with pytest.raises(ValueError, match="lazy layers"):
        find_units(nn.Sequential(nn.LazyLinear(4)), torch.randn(1, 4))
    with pytest.raises(TypeError, match="not list"):
        find_units([], torch.randn(1, 4))


def test_labels_merge_end_and_ignore_padding():
    book = Book()
    a, b = book.start("a", 3), book.start("b", 3)
    assert book.unify(a, torch.tensor([ZERO, NONE, 4]), "why", "where").tolist() == [1, NONE, 3]
    assert set(book.ends()) == {2}
    assert book.find(3) == book.find(4)
    mixed = torch.stack([b, torch.tensor([ZERO, ZERO, ZERO])])
    assert book.reduce(mixed, [0], "why", "where").tolist() == [[4, 5, 6]]
    assert pathprox.UnitGroup.__doc__
