"""The mathematics, against Moreau's identity, scipy and the definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize

from pathprox.prox import (
    decay,
    metric_soft_threshold,
    normalize_factor,
    path_norm,
    project,
    shrink_factor,
    soft_threshold,
)

vectors = arrays(np.float64, st.integers(1, 6), elements=st.floats(-10, 10, allow_subnormal=False))
thresholds = st.floats(0, 20)


def with_steps(low: float):
    """A vector, and as many step sizes spread over several orders of magnitude."""
    return st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            arrays(np.float64, n, elements=st.floats(-10, 10, allow_subnormal=False)),
            arrays(np.float64, n, elements=st.floats(low, 1)).map(lambda e: 10 ** (6 * e - 3)),
        )
    )


@given(vectors, thresholds)
def test_soft_threshold_and_projection_on_the_ball_add_up(v, t):
    """Moreau: the prox of t|.| and the projection on the ball of radius t split v."""
    v = torch.from_numpy(v)
    ball = v * min(1.0, t / float(v.norm())) if v.norm() > 0 else v
    torch.testing.assert_close(soft_threshold(v, t) + ball, v)


@given(vectors, st.floats(0.01, 20))
@settings(max_examples=50)
def test_soft_threshold_minimises_its_definition(v, t):
    x = soft_threshold(torch.from_numpy(v), t).numpy()

    def value(z):
        return 0.5 * ((z - v) ** 2).sum() + t * math.sqrt((z**2).sum())

    other = minimize(
        value, v * 0.5 + 0.01, method="Nelder-Mead", options={"maxiter": 2000, "xatol": 1e-9, "fatol": 1e-12}
    )
    assert value(x) <= other.fun + 1e-7


@given(st.floats(0, 1e-3), st.floats(0, 1e-3))
def test_at_or_under_the_threshold_it_is_exactly_zero(norm, t):
    factor = float(shrink_factor(torch.tensor(norm, dtype=torch.float64), t))
    assert (factor == 0) == (norm <= t)
    assert 0 <= factor <= 1


def test_no_epsilon_revives_the_dead():
    assert torch.equal(soft_threshold(torch.zeros(3, 4), 1e-12), torch.zeros(3, 4))
    assert float(shrink_factor(torch.tensor(1e-8), 1e-9)) == pytest.approx(0.9)


def test_the_norm_can_be_taken_over_any_dimensions():
    v = torch.randn(5, 4, 3, 3)
    by_channel = soft_threshold(v, 1.0, dim=(0, 2, 3))
    for c in range(4):
        torch.testing.assert_close(by_channel[:, c], soft_threshold(v[:, c].flatten(), 1.0).view(5, 3, 3))


@given(with_steps(0.0), st.floats(0.001, 10))
@settings(max_examples=200)
def test_metric_soft_threshold_meets_its_optimality_condition(u_and_step, weight):
    """0 in (x - u)/step + weight * subdifferential of |x|."""
    u, step = (torch.from_numpy(a) for a in u_and_step)
    x = metric_soft_threshold(u, step, weight)
    if (x == 0).all():
        assert (u / step).norm() <= weight * (1 + 1e-9)
    else:
        residual = (x - u) / step + weight * x / x.norm()
        assert (residual * step).norm() <= 1e-7 * (1 + float(u.norm()))


@given(with_steps(0.3), st.floats(0.01, 5))
@settings(max_examples=30)
def test_metric_soft_threshold_minimises_its_definition(u_and_step, weight):
    u, step = u_and_step
    x = metric_soft_threshold(torch.from_numpy(u), torch.from_numpy(step), weight).numpy()

    def value(z):
        return 0.5 * ((z - u) ** 2 / step).sum() + weight * math.sqrt((z**2).sum())

    other = minimize(
        value, u * 0.5 + 0.01, method="Nelder-Mead", options={"maxiter": 3000, "xatol": 1e-9, "fatol": 1e-12}
    )
    assert value(x) <= other.fun + 1e-6 * (1 + abs(other.fun))


def test_metric_soft_threshold_with_equal_steps_is_the_plain_one():
    u = torch.randn(50, 7, dtype=torch.float64) * torch.rand(50, 1)
    weight = torch.rand(50, dtype=torch.float64)
    both = metric_soft_threshold(u, torch.full_like(u, 0.3), weight), soft_threshold(u, 0.3 * weight[:, None])
    torch.testing.assert_close(*both)
    assert (both[0].norm(dim=1) == 0).any()


def test_metric_soft_threshold_survives_extreme_steps():
    """Adam's step for a weight that never had a gradient is lr / 1e-8."""
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float64, 1e-9)):
        u = torch.randn(100, 30, dtype=dtype)
        step = 10 ** (torch.rand(100, 30, dtype=dtype) * 11 - 6)
        weight = torch.full((100,), 0.1, dtype=dtype)
        x = metric_soft_threshold(u, step, weight)
        assert x.isfinite().all()
        alive = x.norm(dim=1) > 0
        residual = (x - u) + step * 0.1 * x / x.norm(dim=1, keepdim=True)
        scale = u.abs() + step * 0.1
        assert (residual / scale)[alive].abs().max() < tolerance


def test_a_zero_step_changes_nothing():
    u = torch.randn(4, 3)
    u[1] = 0
    u[2, 0] = 0
    torch.testing.assert_close(metric_soft_threshold(u, torch.zeros(4, 3), 1.0), u)
    mixed = torch.tensor([[0.0, 1.0, 1.0]]).expand(4, 3)
    assert metric_soft_threshold(u, mixed, 0.1).isfinite().all()


@given(vectors)
def test_projection_has_unit_length_or_stays_zero(w):
    w = torch.from_numpy(w)
    expected = 1.0 if w.norm() > 0 else 0.0
    assert float(project(w).norm()) == pytest.approx(expected)


def test_decay_is_the_prox_of_a_square():
    x, step = torch.randn(5, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    z = decay(x, step, 0.3)
    torch.testing.assert_close((z - x) / step + 0.3 * z, torch.zeros(5, dtype=torch.float64))


def test_path_norms_are_products():
    w, v = torch.randn(2, 6, 4), torch.randn(2, 6, 3)  # leading dimensions pass through
    torch.testing.assert_close(path_norm(w, v), w.norm(dim=-1) * v.norm(dim=-1))
    torch.testing.assert_close(project(w, 2.0).norm(dim=-1), torch.full((2, 6), 2.0))
    assert normalize_factor(torch.zeros(1)) == 1
