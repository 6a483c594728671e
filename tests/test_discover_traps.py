"""Models made to mislead: each was once found wrong, refused for a false reason, or answered with a traceback."""

import dataclasses
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pathprox
from networks import Net, chain
from pathprox import PathProx, balance_, find_units, objective, stationarity
from test_discover import names, reasons


def vector(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape))


def two(forward, **more) -> Net:
    """A layer ``a`` of 8 units, a layer ``c`` that takes 8, and what else the forward pass needs."""
    return Net(forward, a=nn.Linear(4, 8), c=nn.Linear(8, 2), **more)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_parameters_in_the_same_memory_are_not_scaled_apart():
    model = chain(8, 8, 8, 2)
    model[2].weight.data = model[0].weight.data
    units = find_units(model, torch.randn(1, 8))
    assert names(units) == []
    assert "shares memory with" in reasons(units)["0"]
    model = chain(8, 8, 2)
    model.register_buffer("start", model[0].weight.data)
    assert names(find_units(model, torch.randn(1, 8))) == []
    flat = torch.randn(8 * 8 + 2 * 8)  # neighbours in one buffer are no problem
    model = chain(8, 8, 2)
    model[0].weight.data, model[2].weight.data = flat[:64].view(8, 8), flat[64:].view(2, 8)
    assert names(find_units(model, torch.randn(1, 8))) == ["0 -> 2"]


def test_a_model_that_counts_its_training_steps_is_still_tried_in_training():
    def forward(self, x):
        h = torch.relu(self.a(x))
        if not self.training:
            return self.c(h)
        self.steps += 1
        return self.c(h), (self.steps / 1000).clamp(max=1) * self.aux(h)

    model = two(forward, aux=nn.Linear(8, 2))
    model.register_buffer("steps", torch.zeros(()))
    units = find_units(model, X)
    assert names(units) == []
    assert "in training mode" in reasons(units)["a"]
    assert float(model.steps) == 0


def test_what_training_writes_into_buffers_counts_as_an_output():
    def forward(self, x):
        h = torch.relu(self.a(x))
        if self.training:
            self.size.mul_(0.9).add_(0.1 * h.detach().abs().mean())
        return self.c(h)

    model = two(forward)
    model.register_buffer("size", torch.ones(()))
    assert names(find_units(model, X)) == []


@pytest.mark.parametrize("count", [1, 5])
def test_one_sample_does_not_hide_an_auxiliary_head_behind_batch_norm(count):
    def forward(self, x):
        h = torch.relu(self.a(self.norm(x)))
        return (self.c(h), self.aux(h)) if self.training else self.c(h)

    units = find_units(two(forward, aux=nn.Linear(8, 2), norm=nn.BatchNorm1d(4)), torch.randn(count, 4))
    assert names(units) == ["norm -> a"]


def test_python_randomness_in_training_is_repeated():
    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.c(h if self.training and random.random() < 0.3 else h + self.e(torch.relu(self.d(h))))

    model = two(forward, d=nn.Linear(8, 6), e=nn.Linear(6, 8))
    state = random.getstate()
    assert {len(find_units(model, X)) for _ in range(5)} == {2}
    assert random.getstate() == state


def test_a_bias_of_several_dimensions_is_not_penalised():
    model = two(lambda self, x: self.c(torch.relu(self.a(x) + self.position)).mean(1), position=vector(3, 8)).double()
    units = find_units(model, torch.randn(5, 3, 4))
    assert {s.name for s in units.rows()} == {"a.weight", "c.weight"}
    least = objective(units, 0.0, 1.0).balanced
    balance_(units)
    assert objective(units, 0.0, 1.0).weight_decay == pytest.approx(least)


def test_a_constant_unit_weighs_nothing():
    model = chain(4, 8, 2).double()
    with torch.no_grad():
        model[0].weight[0] = 0
    value = objective(find_units(model, X), 0.0, 1.0)
    assert value.unit_balanced == pytest.approx(value.path_norm)


def test_stationarity_sees_the_biases_of_rows_that_are_no_units():
    def forward(self, x):
        left, right = self.f(x).chunk(2, 1)
        return self.g(torch.relu(left)) + self.t(torch.tanh(right))

    model = Net(forward, f=nn.Linear(4, 8), g=nn.Linear(4, 2), t=nn.Linear(4, 2))
    units = find_units(model, X)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    model.f.bias.grad[4:] = 100
    assert stationarity(units, 0.0, bias=True) == stationarity(units, 0.0) == pytest.approx(200)


def test_two_heads_on_flattened_channels_train_under_adam():
    model = Net(
        lambda self, x: (self.p(h := torch.relu(self.conv(x)).flatten(1)), self.v(h)),
        conv=nn.Conv2d(1, 4, 3),
        p=nn.Linear(144, 3),
        v=nn.Linear(144, 1),
    )
    x = torch.randn(2, 1, 8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    PathProx(find_units(model, x), 1e-3).attach(optimizer)
    sum(out.square().mean() for out in model(x)).backward()
    optimizer.step()
    torch.testing.assert_close(model.conv.weight.detach().flatten(1).norm(dim=1), torch.ones(4))


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias"])
def test_frozen_parts_of_w_with_biases_inside(frozen):
    model = chain(4, 8, 7, 6, 2)
    model.get_parameter(frozen).requires_grad_(False)
    before = model.get_parameter(frozen).clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    PathProx(find_units(model, X), 1e-3, bias=True).attach(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.get_parameter(frozen), before)


def grid(self, x):
    return self.c(torch.relu(self.a(self.table)) + torch.relu(self.b(x)))


FOUND = {
    "a parameter as an activation": (two(grid, b=nn.Linear(4, 8), table=vector(1, 4)), ["a, b -> c"]),
    "a sum from the number zero": (two(lambda self, x: self.c(sum([torch.relu(self.a(x))]))), ["a -> c"]),
    "zeros and the unit": (two(lambda self, x: self.c(torch.zeros(5, 8) + torch.relu(self.a(x)))), ["a -> c"]),
    "ones like the unit": (two(lambda self, x: self.c((h := self.a(x)) * torch.ones_like(h))), ["a -> c"]),
    "matrix products": (
        Net(lambda self, x: torch.relu(x @ self.w + self.b) @ self.v, w=vector(4, 8), b=vector(8), v=vector(8, 2)),
        ["w -> v"],
    ),
    "clamp as ReLU": (two(lambda self, x: self.c(self.a(x).clamp(min=0))), ["a -> c"]),
    "a mask of zeros": (two(lambda self, x: self.c(self.a(x).masked_fill(torch.arange(8) > 3, 0.0))), ["a -> c"]),
    "a parameter taken away": (two(lambda self, x: self.c(torch.relu(self.a(x) - self.b)), b=vector(8)), ["a -> c"]),
    "writing into a slice": (two(lambda self, x: self.c(_tripled(self.a(x)))), ["a -> c"]),
}


def _tripled(h):
    h[:, :2] *= 3
    return h


@pytest.mark.parametrize("name", FOUND)
def test_units_are_found_behind(name):
    model, expected = FOUND[name]
    assert names(find_units(model, X)) == expected


def test_slopes_shared_by_units_do_not_make_them_one():
    model = nn.Sequential(nn.Linear(4, 8), nn.PReLU(3), nn.Linear(8, 2))  # a slope a token
    units = find_units(model, torch.randn(2, 3, 4))
    assert [len(g) for g in units] == [8]


REFUSED = {
    "a bias over padding": (
        two(
            lambda self, x: self.c(F.pad(torch.relu(self.a(x)), (0, 2)) + self.beta + F.pad(self.b(x), (8, 0))),
            b=nn.Linear(4, 2),
            beta=vector(10),
        ),
        "b",
        "add joins the unit",
    ),
    "a floor": (two(lambda self, x: self.c(torch.div(self.a(x), 2, rounding_mode="floor"))), "a", "this kind of div"),
    "clamp at one": (two(lambda self, x: self.c(self.a(x).clamp(max=1))), "a", "clamp at 1 is not homogeneous"),
    "a maximum with a buffer": (two(lambda self, x: self.c(torch.max(self.a(x), self.k))), "a", "max of a constant"),
    "bits": (two(lambda self, x: self.c(self.a(x).view(torch.float64))), "a", "view as another type"),
    "an untrained bias": (two(lambda self, x: self.c(F.linear(x, self.w, self.k)), w=vector(8, 4)), "w", "the bias of"),
    "one bias for all": (
        two(lambda self, x: self.c(F.linear(x, self.w, self.s)), w=vector(8, 4), s=vector(1)),
        "w",
        "the bias of",
    ),
    "a masked weight": (
        two(lambda self, x: self.c(F.linear(x, self.w * self.k[:, None])), w=vector(8, 4)),
        "linear (",
        "the weight of this linear is computed",
    ),
    "bfloat16 inside": (two(lambda self, x: self.c(self.a(x).bfloat16().to(x.dtype))), "a", "less than float32"),
    "random slopes": (two(lambda self, x: self.c(F.rrelu(self.a(x), training=self.training))), "a", "at random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_the_true_reason(name):
    model, layer, words = REFUSED[name]
    if name == "a bias over padding":
        model.c = nn.Linear(10, 2)
    model.register_buffer("k", torch.ones(8))
    units = find_units(model, X)
    found = [x for x in units.left_out if x.layer.startswith(layer)]
    assert found, units
    assert words in found[0].reason
    assert not any(layer in g.layers_in for g in units)


def test_a_model_that_keeps_its_last_activation_can_be_copied():
    def forward(self, x):
        self.kept = torch.relu(self.a(x))
        return self.c(self.kept)

    model = two(forward)
    model(X)
    assert names(find_units(model, X)) == ["a -> c"]


def test_pruned_and_old_style_normalised_layers_are_refused_not_broken():
    from torch.nn.utils import prune

    model = chain(4, 8, 2)
    prune.random_unstructured(model[0], "weight", 0.5)
    units = find_units(model, X)
    assert "computed in the forward pass" in reasons(units)["0"]


def test_a_dataclass_output_says_how_to_tell_torch_of_it():
    @dataclasses.dataclass
    class Out:
        logits: torch.Tensor

    model = two(lambda self, x: Out(self.c(torch.relu(self.a(x)))))
    with pytest.raises(ValueError, match="register_dataclass"):
        find_units(model, X)
    torch.export.register_dataclass(Out)
    assert names(find_units(model, X)) == ["a -> c"]
    assert pathprox.__version__
