"""The fast path and the general one take the same steps, whatever the network, the optimizer and the training loop."""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from networks import Net, attached, batch, chain, gelu, linears, train
from pathprox import PathProx, find_units, shrink_
from pathprox.experiments.models import MLP, VGG
from pathprox.layout import lay_out
from pathprox.slices import Slice
from reference import ReferencePathProx

TINY = (6, 6, "M", 8, 8, "M", 8, "A")


def flat(x):
    return x.flatten(1)


NETWORKS = {
    "one coupling": lambda: chain(8, 16, 4),
    "an odd layer": lambda: chain(8, 12, 10, 4),
    "a chain": lambda: chain(8, 12, 10, 9, 8, 7, 4),
    "a chain without biases": lambda: chain(8, 12, 10, 9, 4, bias=False),
    "factorized": lambda: MLP(3, 14, factorized=True, inputs=8, classes=4),
    "VGG": lambda: VGG(TINY, channels=2, classes=4),
    "VGG with batch norm": lambda: VGG(TINY, batch_norm=True, channels=2, classes=4),
    "VGG, channels last": lambda: VGG(TINY, channels=2, classes=4).to(memory_format=torch.channels_last),
    "flatten": lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 4)),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.ReLU(), nn.Conv2d(6, 4, 4), nn.Flatten()
    ),
    "grouped": lambda: nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3, groups=2), nn.ReLU(), nn.Conv2d(6, 4, 4), nn.Flatten()
    ),
    "transposed": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.ReLU(), nn.ConvTranspose2d(5, 4, 3), nn.AvgPool2d(8), nn.Flatten()
    ),
    "residual": lambda: Net(
        lambda self, x: self.c(x + self.b(torch.relu(self.a(x)))),
        a=nn.Linear(8, 12),
        b=nn.Linear(12, 8),
        c=nn.Linear(8, 4),
    ),
    "concatenation": lambda: Net(
        lambda self, x: self.c(torch.relu(torch.cat([self.a(x), self.b(x)], 1))),
        a=nn.Linear(8, 7),
        b=nn.Linear(8, 6),
        c=nn.Linear(13, 4),
    ),
    "fork": lambda: Net(
        lambda self, x: torch.cat([self.b(y := torch.relu(self.a(x))), self.c(y)], 1),
        a=nn.Linear(8, 12),
        b=nn.Linear(12, 3),
        c=nn.Linear(12, 1),
    ),
    "sum of two": lambda: Net(
        lambda self, x: self.c(torch.relu(self.a(x) + self.b(x))),
        a=nn.Linear(8, 12),
        b=nn.Linear(8, 12),
        c=nn.Linear(12, 4),
    ),
    "a tied layer before": lambda: Net(
        lambda self, x: self.b(torch.relu(self.a(self.tied(torch.relu(self.tied(x)))))),
        tied=nn.Linear(8, 8),
        a=nn.Linear(8, 10),
        b=nn.Linear(10, 4),
    ),
    "transposed in memory": lambda: turned(chain(8, 12, 10, 9, 4)),
}
IMAGES = ("VGG", "flatten", "depthwise", "grouped", "transposed")
OPTIMIZERS = {
    "SGD": lambda p: optim.SGD(p, lr=0.05),
    "momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "Nesterov": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0),
    "tensor lr": lambda p: optim.SGD(p, lr=torch.tensor(0.05, dtype=torch.float64), momentum=0.5),
}


def turned(model):
    for layer in linears(model):
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
    return model


def data_for(name, dtype=torch.float64):
    x, y = batch()
    if name.startswith(IMAGES) and name != "transposed in memory":
        x = torch.randn(16, 2, 8, 8)
    return x.to(dtype), y[: len(x)]


def twins(model, data, make, weight_decay=0.05, **options):
    """(model, optimizer, PathProx) twice: fast, and slow."""
    found = []
    for fast in (True, False):
        twin = copy.deepcopy(model)
        optimizer, prox = attached(twin, data[0], make, weight_decay, **options)
        prox._fast.on = fast
        found.append((twin, optimizer, prox))
    return found


def assert_alike(fast, slow, rtol=1e-7, atol=1e-8, used=True):
    for (name, a), b in zip(fast[0].named_parameters(), slow[0].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
        assert torch.equal(a == 0, b == 0), name
        for key, value in fast[1].state[a].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, slow[1].state[b][key], rtol=rtol, atol=atol)
    assert (fast[2]._fast.step is not None) == used
    assert slow[2]._fast.step is None


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("SGD", {}),
        ("momentum", {}),
        pytest.param("momentum", {"bias": True}, marks=pytest.mark.slow),
        pytest.param("Nesterov", {"balance": False}, marks=pytest.mark.slow),
        ("AdamW", {}),
        pytest.param("tensor lr", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_hundred_steps_are_the_same(name, make, options):
    """The tolerance leaves room for biases in front of a batch norm, which AdamW moves by rounding errors alone."""
    model, data = NETWORKS[name]().double(), data_for(name)
    pair = twins(model, data, OPTIMIZERS[make], **options)
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 100)
    assert_alike(*pair)


@pytest.mark.parametrize("name", NETWORKS)
def test_twenty_steps_in_float32(name):
    model, data = NETWORKS[name](), data_for(name, torch.float32)
    pair = twins(model, data, OPTIMIZERS["momentum"])
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 20)
    assert_alike(*pair, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_agrees_with_the_reference_in_float32(momentum):
    model, (x, y) = chain(8, 12, 10, 9, 8, 7, 4), batch()
    twin, lr = copy.deepcopy(model), 0.05 * (1 - momentum)
    optimizer, prox = attached(model, x, lambda p: optim.SGD(p, lr=lr, momentum=momentum), 0.05)
    reference = ReferencePathProx(linears(twin), lr, 0.05, momentum)
    for _ in range(30):
        train(model, optimizer, (x, y), 1)
        twin.zero_grad()
        cross_entropy(twin(x), y).backward()
        reference.step()
    assert prox._fast.step is not None
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_units_that_cannot_be_rescaled_take_the_general_path():
    model = gelu().double()
    x, y = torch.randn(16, 4).double(), torch.randint(0, 3, (16,))
    units = find_units(model, x[:1], homogeneous_only=False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    prox = PathProx(units, 0.01).attach(optimizer)
    train(model, optimizer, (x, y), 3)
    assert prox._fast.step is None


@pytest.mark.parametrize("make", ["momentum", "AdamW"])
def test_schedules_groups_and_a_changed_weight_decay(make):
    model, data = chain(8, 12, 10, 9, 8, 7, 4).double(), data_for("")

    def by_layer(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[i : i + 4], "lr": 0.01 * (i + 1)} for i in range(0, len(parameters), 4)]
        return OPTIMIZERS[make](groups)

    pair = twins(model, data, by_layer)
    for one, optimizer, prox in pair:
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        for step in range(60):
            train(one, optimizer, data, 1)
            schedule.step()
            prox.weight_decay = 0.05 if step < 30 else 0.01
    assert_alike(*pair)


def test_a_v_in_two_groups_takes_the_general_path():
    model, data = NETWORKS["fork"]().double(), data_for("")
    pair = twins(model, data, lambda p: optim.SGD([{"params": q, "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]))
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 10)
    assert_alike(*pair, used=False)


def test_a_layer_that_dies_stops_the_balance_of_its_chain():
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    with torch.no_grad():
        model[2].weight.mul_(1e-3)
    pair = twins(model, data, OPTIMIZERS["momentum"], 0.5)
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 60)
    assert linears(pair[0][0])[1].weight.abs().max() == 0
    assert_alike(*pair)


@pytest.mark.parametrize("frozen", ["0", "0.bias", "2.bias", "4", "6"])
def test_freezing_and_thawing(frozen):
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    pair = twins(model, data, OPTIMIZERS["momentum"])
    for one, optimizer, _ in pair:
        for steps, free in ((10, True), (10, False), (10, True)):
            for name, p in one.named_parameters():
                p.requires_grad_(free or not name.startswith(frozen))
            train(one, optimizer, data, steps)
    assert_alike(*pair)


def test_layers_without_a_gradient_in_some_steps():
    model = NETWORKS["sum of two"]().double()
    data = data_for("")
    pair = twins(model, data, OPTIMIZERS["momentum"])
    for one, optimizer, _ in pair:
        for step in range(30):
            optimizer.zero_grad()
            cross_entropy(one(data[0]), data[1]).backward()
            if step % 3 == 1:
                one.b.weight.grad = None
            if step % 5 == 2:
                one.c.weight.grad = None
            optimizer.step()
    assert_alike(*pair)


def test_weights_that_are_edited_or_start_at_zero():
    model, data = chain(8, 12, 10, 9, 4).double(), data_for("")
    pair = twins(model, data, OPTIMIZERS["momentum"])
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 5)
        with torch.no_grad():
            one[0].weight.mul_(3)
        train(one, optimizer, data, 5)
        with torch.no_grad():
            one[0].weight[2] = 0
        train(one, optimizer, data, 20)
    assert_alike(*pair)
    assert pair[0][2]._couplings[0].waiting


def test_parameters_that_move_in_memory_are_followed():
    model, data = VGG(TINY, channels=2, classes=4), data_for("VGG", torch.float32)
    pair = twins(model, data, OPTIMIZERS["momentum"])
    for one, optimizer, _ in pair:
        train(one, optimizer, data, 3)
        one.to(memory_format=torch.channels_last)
        train(one, optimizer, data, 3)
        one.double()
        optimizer.load_state_dict(optimizer.state_dict())
        train(one, optimizer, (data[0].double(), data[1]), 3)
    assert_alike(*pair, rtol=1e-4, atol=1e-5)


def test_units_that_leave_in_training():
    model, data = chain(8, 30, 20, 20, 4).double(), data_for("")
    pair = twins(model, data, OPTIMIZERS["momentum"], 0.1, shrink_every=20, patience=5)
    for one, optimizer, prox in pair:
        train(one, optimizer, data, 90)
        shrink_(one, prox.units, optimizer)
        train(one, optimizer, data, 10)
    assert pair[0][0][0].out_features < 30
    assert_alike(*pair)


def test_a_step_that_a_grad_scaler_skips():
    model, data = chain(8, 12, 10, 9, 4), data_for("", torch.float32)
    pair = twins(model, data, lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True), 0.01)
    for one, optimizer, _ in pair:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        for step in range(12):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(one(data[0]), data[1])).backward()
            if step % 4 == 1:
                one[2].weight.grad[0, 0] = torch.inf
            before = copy.deepcopy(one.state_dict())
            scaler.step(optimizer)
            scaler.update()
            if step % 4 == 1:
                assert all(torch.equal(value, before[key]) for key, value in one.state_dict().items())
    assert_alike(*pair, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_not_finite_is_an_error_before_anything_is_overwritten(fast):
    model, data = chain(8, 12, 4), data_for("", torch.float32)
    optimizer, prox = attached(model, data[0], lambda p: optim.SGD(p, lr=0.1, momentum=0.9))
    prox._fast.on = fast
    train(model, optimizer, data, 2)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for bad in (torch.nan, torch.inf, -torch.inf):
        model[0].weight.grad[1, 2] = bad
        with pytest.raises(FloatingPointError, match=r"gradient of 0\.weight"):
            optimizer.step()
    model[0].weight.grad.fill_(1e38)  # their sum overflows, and they are finite
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before[0])
    optimizer.param_groups[0]["lr"] = 1e10
    with pytest.raises(FloatingPointError, match="weights of 0 -> 2 are not finite"):
        optimizer.step()


def test_the_fused_step_is_not_copied_and_the_copy_makes_its_own():
    model, data = chain(8, 12, 10, 9, 4), data_for("", torch.float32)
    optimizer, prox = attached(model, data[0], OPTIMIZERS["momentum"])
    train(model, optimizer, data, 3)
    other = copy.deepcopy(prox)
    assert other._fast.step is None
    train(other.units.model, other.optimizer, data, 5)
    train(model, optimizer, data, 5)
    assert other._fast.step is not None
    for a, b in zip(model.parameters(), other.units.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 2), (6, 5, 1, 1), (6, 1, 3, 3), (1, 5), (1, 1)])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("order", ["contiguous", "channels last", "transposed"])
def test_a_piece_is_the_parameter_in_the_order_of_its_memory(shape, dims, order):
    weight = torch.randn(shape)
    if order == "channels last" and len(shape) == 4:
        weight = weight.to(memory_format=torch.channels_last)
    elif order == "transposed":
        weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
    count = torch.Size(shape[d] for d in dims).numel()
    s = Slice("x", shape, dims, torch.arange(count).flip(0), count)
    piece = lay_out(s, nn.Parameter(weight.clone()), torch.arange(count), count)
    factor = torch.rand(count)
    expected = piece.parameter.detach().clone()
    s.scale_(expected, factor)
    assert piece.parameter.stride() == weight.stride()
    with torch.no_grad():
        piece.view(piece.parameter).mul_(factor[piece.slots].view(piece.positions))
    torch.testing.assert_close(piece.parameter.detach(), expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("networks", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_the_kernels_do_what_torch_does(networks):
    """In Triton's interpreter, which has to be asked for before Triton is imported."""
    script = Path(__file__).with_name("kernels_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, script, networks], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
