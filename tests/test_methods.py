"""The methods that are not in the library: variations of the authors' code, and torch's own weight decay."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from networks import batch, chain, linears, train
from pathprox import find_units
from pathprox.experiments.methods import METHODS
from reference import ReferencePathProx

SGD = torch.optim.SGD
WEIGHT_DECAY = 0.05


class BalancingFirst(ReferencePathProx):
    @torch.no_grad()
    def step(self) -> None:
        self.gradient_step()
        self.balance_layers()
        self.project_w()
        self.threshold_v()


class AsTheAuthors(BalancingFirst):
    """Without the fold at the start, and with the bias divided whenever w is."""

    @torch.no_grad()
    def __init__(self, layers: list[nn.Linear], lr: float, weight_decay: float) -> None:
        super().__init__([], lr, weight_decay, balance=False)
        self.layers, self.pairs = layers, list(zip(layers[::2], layers[1::2], strict=False))
        self.project_w()
        self.balance_layers()  # PathProx does so when it is attached; that code at its first step

    def project_w(self) -> None:
        for first, _ in self.pairs:
            first.bias /= first.weight.norm(dim=1)
        super().project_w()


def doubles(*sizes: int) -> tuple[nn.Sequential, tuple[Tensor, Tensor]]:
    model, (x, y) = chain(*sizes).double(), batch()
    return model, (x.double(), y)


def attach(name: str, model: nn.Module, x: Tensor, lr: float) -> torch.optim.Optimizer:
    optimizer = SGD(model.parameters(), lr=lr)
    METHODS[name].make(find_units(model, x[:1]), WEIGHT_DECAY).attach(optimizer)
    return optimizer


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sizes", [(8, 12, 10, 9, 4), (8, 12, 10, 9, 8, 4)])
@pytest.mark.parametrize(
    ("name", "kind", "steps"), [("pathprox-before", BalancingFirst, 100), ("pathprox-authors", AsTheAuthors, 250)]
)
def test_the_authors_order_balances_the_layers_before_the_proximal_step(name, kind, steps, sizes):
    model, data = doubles(*sizes)
    twins = [copy.deepcopy(model) for _ in range(2)]
    references = [
        made(linears(twin), 0.05, WEIGHT_DECAY) for made, twin in zip((kind, ReferencePathProx), twins, strict=True)
    ]
    optimizer = attach(name, model, data[0], 0.05)
    for _ in range(steps):
        train(model, optimizer, data, 1)
        for twin, reference in zip(twins, references, strict=True):
            twin.zero_grad()
            cross_entropy(twin(data[0]), data[1]).backward()
            reference.step()
    assert_same(model, twins[0])
    dead = linears(model)[1].weight.norm(dim=0) == 0
    assert dead.any(), "the comparison covers exact zeros"
    assert not dead.all(), "and other units"
    assert not torch.allclose(linears(model)[1].weight, linears(twins[1])[1].weight, rtol=1e-4), "the order matters"


def test_biases_are_decayed_as_by_torchs_optimizers():
    model, data = doubles(8, 12, 10, 4)
    twin = copy.deepcopy(model)
    train(model, attach("weight-decay-biases", model, data[0], 0.05), data, 20)
    train(twin, SGD(twin.parameters(), lr=0.05, weight_decay=WEIGHT_DECAY), data, 20)
    assert_same(model, twin)


def test_the_authors_code_divides_the_bias_beside_w_as_well():
    model, data = doubles(8, 12, 4)
    w, b = list(model.parameters())[:2]
    rows, bias, lr = torch.linalg.vector_norm(w, dim=1), b.detach().clone(), 0.5
    optimizer = attach("pathprox-biases", model, data[0], lr)
    torch.testing.assert_close(torch.linalg.vector_norm(w, dim=1), torch.ones_like(rows))
    torch.testing.assert_close(b, bias / rows)
    cross_entropy(model(data[0]), data[1]).backward()
    moved = [(p - lr * p.grad).detach() for p in (w, b)]
    norm = torch.linalg.vector_norm(moved[0], dim=1)
    optimizer.step()
    torch.testing.assert_close(w, moved[0] / norm[:, None])
    torch.testing.assert_close(b, moved[1] / norm)
