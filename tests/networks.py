"""Small networks that several tests use."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pathprox


class Net(nn.Module):
    """A module from layers and a function of them."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def chain(*sizes: int, bias: bool = True) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 1):
        layers += [nn.Linear(sizes[i], sizes[i + 1], bias=bias), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def strong(*sizes: int, by: float = 3.0) -> nn.Sequential:
    """A chain in float64 whose units have path norms far above 1."""
    model = chain(*sizes).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(by)
    return model


def linears(model: nn.Module) -> list[nn.Linear]:
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def batch(inputs: int = 8, classes: int = 4, count: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(count, inputs), torch.randint(0, classes, (count,))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: tuple[Tensor, Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = cross_entropy(model(data[0]), data[1])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def attached(model: nn.Module, x: Tensor, make, weight_decay: float = 0.01, **options):
    """(optimizer, regulariser) on the model's own parameters."""
    optimizer = make(model.parameters())
    return optimizer, pathprox.PathProx(pathprox.find_units(model, x[:1]), weight_decay, **options).attach(optimizer)


def assert_on_the_sphere(units: pathprox.Units) -> None:
    for group in units.couplings:
        assert (units.norm(group.into).double() - 1).abs().max() < 1e-6


def assert_balanced(units: pathprox.Units) -> None:
    for chained in units.chains:
        members = [g for g in chained if any(g is c for c in units.couplings)]
        totals = torch.stack([(units.norm(g.into) * units.norm(g.out)).sum() for g in members])
        assert (totals / totals.mean() - 1).abs().max() < 1e-5


def gelu() -> nn.Sequential:
    """Its units can be removed, but not rescaled."""
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def kill(units: pathprox.Units, share: float = 0.5) -> None:
    """Make a random share of units dead, and of bundles: unheard, or silent where that is the same."""
    with torch.no_grad():
        for group in (*units, *units.bundles):
            dead = torch.rand(len(group)) < share
            unheard = (torch.rand(len(group)) < 0.5) | torch.tensor(not group.homogeneous)
            for slices, off in ((group.out, dead & unheard), (group.into + group.bias, dead & ~unheard)):
                for s in slices:
                    tensor = units.tensor(s.name)
                    s.scale_(tensor.detach(), torch.where(off, 0.0, 1.0).to(tensor))


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def image(channels: int = 3, size: int = 8) -> Tensor:
    return torch.randn(2, channels, size, size)


def words(width: int = 16, count: int = 5) -> Tensor:
    return torch.randn(2, count, width)
