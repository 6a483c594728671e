"""Local Lipschitz constants are spectral norms of Jacobians."""

import pytest
import torch
from torch import nn

from networks import chain
from pathprox import local_lipschitz
from pathprox.experiments.models import MLP, VGG


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (chain(5, 9, 3), (5,)),
        (chain(2, 9, 6), (2,)),  # more outputs than inputs
        (MLP(3, 20, factorized=True, inputs=12), (1, 3, 4)),
        (VGG((4, "M", 4, "M", 4, "M", 4, "M", 4, "M"), batch_norm=True), (3, 32, 32)),
    ],
)
def test_it_is_the_spectral_norm_of_each_jacobian(model, shape):
    x = torch.randn(7, *shape)
    mine = local_lipschitz(model, x, batch_size=3)
    model.eval()
    for i in range(7):
        jacobian = torch.autograd.functional.jacobian(lambda z: model(z[None])[0], x[i]).flatten(1)
        assert float(mine[i]) == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=1e-4)


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.ReLU(), nn.Linear(8, 2)).train()
    model[1].eval()
    local_lipschitz(model, torch.randn(3, 4))
    assert [m.training for m in model] == [True, False, True, True]
    assert all(p.grad is None for p in model.parameters())


def test_a_linear_map_has_its_spectral_norm_everywhere():
    model = nn.Linear(6, 4)
    norms = local_lipschitz(model, torch.randn(5, 6))
    torch.testing.assert_close(norms, torch.linalg.matrix_norm(model.weight.detach(), 2).expand(5))


def test_other_models_are_refused():
    class Two(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(ValueError, match="one tensor with a row a sample; got tuple"):
        local_lipschitz(Two(), torch.randn(3, 4))
    with pytest.raises(ValueError, match="shape"):
        local_lipschitz(nn.Flatten(0), torch.randn(3, 4))
