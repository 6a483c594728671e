"""The convex oracle: with w frozen and a squared loss, the problem in v is sklearn's MultiTaskLasso.

Whatever the optimizer, PathProx has to end at that solution: same support, same values. A threshold that is off by the
momentum's factor, or a metric that is forgotten, misses it by far.
"""

import pytest
import torch
from sklearn.linear_model import MultiTaskLasso
from torch import nn

import pathprox

WEIGHT_DECAY = 0.05

OPTIMIZERS = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.5), 4000),
    "SGD momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 2000),
    "SGD momentum dampening": (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9, dampening=0.5), 2000),
    "SGD nesterov": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 2000),
    "Adam": (lambda p: torch.optim.Adam(p, lr=0.01), 3000),
    "Adam amsgrad": (lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True), 6000),
    "NAdam": (lambda p: torch.optim.NAdam(p, lr=0.01), 3000),
    "RAdam": (lambda p: torch.optim.RAdam(p, lr=0.01), 5000),
    "Adamax": (lambda p: torch.optim.Adamax(p, lr=0.01), 5000),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=0.003), 6000),
    "RMSprop momentum": (lambda p: torch.optim.RMSprop(p, lr=0.0005, momentum=0.9), 4000),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.5), 3000),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, lr=1.0), 8000),
    "AdamW in the metric": (lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0), 3000),
}


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4, bias=False)).double()
    model[0].requires_grad_(False)
    x = torch.randn(200, 6, dtype=torch.float64)
    y = torch.relu(x[:, :4]) + 0.1 * torch.randn(200, 4, dtype=torch.float64)
    return model, x, y


def lasso_solution(model, x, y):
    """With features divided by |w|, sum |w| |v| is MultiTaskLasso's penalty."""
    norm = model[0].weight.norm(dim=1)
    features = torch.relu(model[0](x)) / norm
    lasso = MultiTaskLasso(alpha=WEIGHT_DECAY, fit_intercept=False, tol=1e-12, max_iter=100000)
    lasso.fit(features.detach().numpy(), y.numpy())
    return torch.from_numpy(lasso.coef_) / norm


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_ends_at_the_lasso_solution(name):
    model, x, y = problem()
    solution = lasso_solution(model, x, y)
    support = solution.norm(dim=0) > 0
    assert 5 < support.sum() < 18  # the problem is neither empty nor full
    make, steps = OPTIMIZERS[name]
    optimizer = make(model[2].parameters())
    units = pathprox.find_units(model, x[:1])
    pathprox.PathProx(units, WEIGHT_DECAY, decoupled=False).attach(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1.0 if t < 0.7 * steps else 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(x) - y).square().sum(1).mean()).backward()
        optimizer.step()
        schedule.step()
    v = model[2].weight.detach()
    assert torch.equal(v.norm(dim=0) > 0, support)
    assert (v - solution).norm() / solution.norm() < 1e-4
