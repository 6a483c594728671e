"""500 random small networks: every group found is right, checked here apart from the library's own proof."""

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from pathprox import balance_, find_units

NETWORKS, PARTS, QUICK = 500, 20, 2
"""So many parts are run by `make test`, all by `make test-slow`."""


class Skip(nn.Module):
    def __init__(self, inner: nn.Module, after: nn.Module):
        super().__init__()
        self.inner, self.after = inner, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(x + self.inner(x))


class Gate(nn.Module):
    """One branch times another, which is bent in some way."""

    def __init__(self, linear: nn.Module, gate: nn.Module):
        super().__init__()
        self.linear, self.gate = linear, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x) * self.linear(x)


class GlobalMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(tuple(range(2, x.dim())))


class Builder:
    """Draws a network layer by layer, keeping track of the activation's shape."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.dims = self.random.choice([0, 0, 1, 2, 2, 3])
        self.channels = self.random.randint(1, 4)
        self.size = self.random.randint(6, 9)

    def build(self) -> tuple[nn.Module, Tensor]:
        shape = (2, self.channels, *[self.size] * self.dims)
        layers: list[nn.Module] = []
        for _ in range(self.random.randint(1, 3)):
            layers += self.part()
        layers += self.end()
        return nn.Sequential(*layers), torch.randn(shape)

    def part(self) -> list[nn.Module]:
        kind = self.random.random()
        if kind < 0.25:
            return [*self.layer(), *self.activation(), self.skip()]
        if kind < 0.4:
            return [*self.layer(), *self.activation(), self.gate()]
        return [*self.layer(), *self.activation(), *self.pool()]

    def layer(self, channels: int | None = None, keep: bool = False) -> list[nn.Module]:
        out = channels or self.random.randint(2, 7)
        bias = self.random.random() < 0.6
        if self.dims == 0:
            layer: nn.Module = nn.Linear(self.channels, out, bias=bias)
        elif not keep and self.random.random() < 0.25:
            kinds = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
            layer = kinds[self.dims](self.channels, out, 2, bias=bias)
            self.size += 1
        else:
            kinds = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
            kernel = self.random.choice([1, 3])
            mode = (
                self.random.choice(["zeros", "reflect", "circular"])
                if kernel == 3 and self.dims < 3 and self.size > 2
                else "zeros"
            )
            groups = 2 if self.channels % 2 == out % 2 == 0 and self.random.random() < 0.3 else 1
            options = {"padding": kernel // 2, "bias": bias, "padding_mode": mode, "groups": groups}
            layer = kinds[self.dims](self.channels, out, kernel, **options)
        self.channels = out
        return [layer, *self.norm()]

    def norm(self) -> list[nn.Module]:
        if self.random.random() < 0.7:
            return []
        kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
        return [kinds[self.dims](self.channels, affine=self.random.random() < 0.85)]

    def activation(self) -> list[nn.Module]:
        choices = [
            nn.ReLU(),
            nn.ReLU(inplace=True),
            nn.LeakyReLU(0.2),
            nn.PReLU(),
            nn.PReLU(self.channels),
            nn.Identity(),
            nn.Dropout(0.3),
        ]
        choices += [nn.GELU(), nn.Sigmoid()]  # these end the units
        return [self.random.choice(choices) for _ in range(self.random.randint(1, 2))]

    def pool(self) -> list[nn.Module]:
        if self.dims == 0 or self.size < 4 or self.random.random() < 0.5:
            return []
        kind = self.random.choice(["MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool"])
        self.size = self.size // 2
        return [getattr(nn, f"{kind}{self.dims}d")(self.size if "Adaptive" in kind else 2)]

    def skip(self) -> nn.Module:
        channels = self.channels
        inner = [*self.layer(keep=True), *self.activation(), *self.layer(channels, keep=True)]
        return Skip(nn.Sequential(*inner), self.random.choice([nn.ReLU(), nn.Identity()]))

    def gate(self) -> nn.Module:
        out, inside = self.random.randint(2, 7), self.channels
        linear = self.layer(out, keep=True)
        self.channels = inside
        bend = self.random.choice([nn.Sigmoid(), nn.SiLU(), nn.ReLU(), nn.Softplus()])
        return Gate(nn.Sequential(*linear), nn.Sequential(*self.layer(out, keep=True), bend))

    def end(self) -> list[nn.Module]:
        if self.dims == 0:
            return [nn.Linear(self.channels, 3)]
        if self.random.random() < 0.5:
            return [GlobalMean(), nn.Linear(self.channels, 3)]
        return [nn.Flatten(), nn.Linear(self.channels * self.size**self.dims, 3)]


def check(model: nn.Module, x: Tensor) -> int:
    units = find_units(model, x)
    layers = {
        name
        for name, m in model.named_modules()
        if getattr(m, "weight", None) is not None and not isinstance(m, nn.PReLU)
    }
    accounted = {layer for g in units for layer in g.layers_in} | {y.layer for y in units.left_out}
    assert layers <= accounted, "every layer is a unit or has a reason"
    assert all(y.reason for y in units.left_out)
    assert not any("proof" in y.reason for y in units.left_out), "the engine claimed what the proof refused"
    seen: set[tuple[str, int]] = set()
    for group in units.couplings:
        entries = {e for s in group.weights for e in owned_entries(s)}
        assert not entries & seen, "couplings share a weight"
        seen |= entries
    for group in units:
        check_group(copy.deepcopy(model).double().eval(), group, x.double())
    double = copy.deepcopy(units)
    double.model.double().eval()
    for level in ("units", "layers", "network"):
        before = double.model(x.double())
        balance_(double, level)
        assert close(double.model(x.double()), before), level
    return len(units)


def owned_entries(s) -> list[tuple[str, int]]:
    numbers = torch.arange(torch.Size(s.shape).numel()).view(s.shape)
    return [(s.name, int(i)) for i in numbers[s.expand(torch.zeros(s.units)).expand(s.shape) == 0]]


def check_group(model: nn.Module, group, x: Tensor) -> None:
    """One unit at a time: rescaled, it changes nothing; silenced, it is not heard."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
        before = model(x)
        unit = torch.randint(len(group), ()).item()
        factor = torch.ones(len(group), dtype=torch.float64)
        factor[unit] = 3.7
        for s in group.into + group.bias:
            s.scale_(tensors[s.name], factor)
        for s in group.out:
            s.scale_(tensors[s.name], 1 / factor)
        assert close(model(x), before), group.name
        factor[unit] = 0
        for s in group.out:
            s.scale_(tensors[s.name], factor)
        silent = model(x)
        for s in group.into + group.bias + group.carried:
            factor[unit] = 2.3
            s.scale_(tensors[s.name], factor)
        assert close(model(x), silent), group.name


def close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-9 * (1 + b.abs().max()))


@pytest.mark.parametrize(
    "part", [*range(QUICK), *(pytest.param(i, marks=pytest.mark.slow) for i in range(QUICK, PARTS))]
)
def test_no_group_of_a_random_network_is_wrong(part):
    found = 0
    for seed in range(part * NETWORKS // PARTS, (part + 1) * NETWORKS // PARTS):
        torch.manual_seed(seed)
        model, x = Builder(seed).build()
        try:
            found += check(model, x)
        except Exception as error:
            raise AssertionError(f"network {seed}:\n{model}\ninput {tuple(x.shape)}") from error
    assert found > NETWORKS / PARTS  # more than one group a network
