"""The mathematics, as pure functions on matrices whose rows are units.

Legend (the paper's letters): a unit has input weights ``w`` and output weights ``v``; lambda is ``weight_decay``;
gamma, the step size, is ``step``. Every function works on the last dimension and lets leading dimensions (units,
batches of runs) through.

The step size may be one number or one number per weight. The second is the *metric* of an adaptive optimizer: it
moved the weights by ``-step * gradient``, so the proximal point has to be measured in the norm sum_j x_j^2 / step_j.
Every formula below leaves the stationary points of the objective where they are, whatever the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEWTON_STEPS = 12
"""The root is approached from one side; float32 settles in about five steps, float64 in about eight."""


def shrink_factor(norm: Tensor, threshold: Tensor | float) -> Tensor:
    """The factor of the group soft threshold: ``1 - threshold / norm``, exactly 0 where ``norm <= threshold``.

    There is no epsilon in the division: one would bring dead units back to life as soon as it exceeds the threshold.
    """
    threshold = torch.as_tensor(threshold, dtype=norm.dtype, device=norm.device)
    alive = norm > threshold
    return torch.where(alive, 1 - threshold / torch.where(alive, norm, 1), 0)


def soft_threshold(v: Tensor, threshold: Tensor | float, dim: int | tuple[int, ...] = -1) -> Tensor:
    """argmin_x  1/2 |x - v|^2 + threshold |x|, the norm taken over ``dim``."""
    norm = torch.linalg.vector_norm(v, dim=dim, keepdim=True)
    return v * shrink_factor(norm, threshold)


def project(w: Tensor, norm: Tensor | float = 1.0) -> Tensor:
    """The nearest point of length ``norm`` in the last dimension; a zero vector has no direction and stays zero."""
    return w * normalize_factor(torch.linalg.vector_norm(w, dim=-1), norm).unsqueeze(-1)


def normalize_factor(norm: Tensor, target: Tensor | float = 1.0) -> Tensor:
    """What a vector of length ``norm`` is multiplied with to have length ``target``; 1 for a zero vector."""
    return torch.where(norm > 0, target / torch.where(norm > 0, norm, 1), 1)


def path_norm(w: Tensor, v: Tensor) -> Tensor:
    """|w| |v| of every unit."""
    return torch.linalg.vector_norm(w, dim=-1) * torch.linalg.vector_norm(v, dim=-1)


def decay(x: Tensor, step: Tensor | float, weight_decay: Tensor | float) -> Tensor:
    """argmin_z  1/2 sum_j (z_j - x_j)^2 / step_j + weight_decay/2 |z|^2: weight decay as a proximal step."""
    return x / (1 + step * weight_decay)


def metric_soft_threshold(u: Tensor, step: Tensor, weight: Tensor | float) -> Tensor:
    """argmin_x  1/2 sum_j (x_j - u_j)^2 / step_j + weight |x|, over the last dimension.

    With c_j = step_j * weight, the solution is 0 iff sum_j (u_j / c_j)^2 <= 1, else x_j = r u_j / (r + c_j) where r =
    |x| is the root of sum_j (u_j / (r + c_j))^2 = 1. Newton's method on 1/sqrt(sum) - 1, which is concave and
    increasing, started at a lower bound (|u| - max_j c_j, and every |u_j| - c_j) climbs to the root without passing
    it.
    """
    c = step * torch.as_tensor(weight, dtype=u.dtype, device=u.device).unsqueeze(-1)

    def ratio(r: Tensor) -> Tensor:
        return torch.where(u == 0, 0, u / (r + c))

    zero = torch.zeros_like(u[..., :1])
    alive = torch.linalg.vector_norm(ratio(zero), dim=-1, keepdim=True) > 1
    whole = torch.linalg.vector_norm(u, dim=-1, keepdim=True) - c.amax(-1, keepdim=True)
    r = torch.maximum(whole, (u.abs() - c).amax(-1, keepdim=True)).clamp_min(0)
    for _ in range(NEWTON_STEPS):
        q = ratio(r)
        length = torch.linalg.vector_norm(q, dim=-1, keepdim=True)
        slope = torch.where(q == 0, 0, q * q / (r + c)).sum(-1, keepdim=True) / length.pow(3)
        move = (1 - 1 / length) / slope
        move = torch.where(alive & move.isfinite(), move, 0)
        r = (r + move).clamp_min(0)
        if r.device.type == "cpu" and bool((move.abs() <= 4 * torch.finfo(r.dtype).eps * r).all()):
            break  # on a GPU the question would cost more than the steps it saves
    return torch.where(alive & (u != 0), r * u / (r + c), 0)
