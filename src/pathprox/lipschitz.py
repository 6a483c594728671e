"""Local Lipschitz constants."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def local_lipschitz(model: nn.Module, x: Tensor, batch_size: int = 256) -> Tensor:
    """The local Lipschitz constant of ``model`` at each sample of ``x``: the spectral norm of the Jacobian of output
    by input.

    The model is called in evaluation mode, in which samples must not influence each other, and left in the mode it
    was in. One backward pass for each output gives the Jacobians of a whole batch; their Gram matrices are as small
    as the output.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        return torch.cat([_spectral_norms(model, part) for part in x.split(batch_size)])
    finally:
        for module, mode in modes.items():
            module.training = mode


@torch.enable_grad()
def _spectral_norms(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    y = model(x)
    if not isinstance(y, Tensor) or y.shape[:1] != x.shape[:1]:
        raise ValueError(
            f"local_lipschitz needs a model that returns one tensor with a row a sample; got {type(y).__name__}"
            + (f" of shape {tuple(y.shape)} for inputs of shape {tuple(x.shape)}" if isinstance(y, Tensor) else "")
        )
    outputs = y.reshape(len(y), -1).unbind(1)
    rows = [
        torch.autograd.grad(o.sum(), x, retain_graph=i + 1 < len(outputs))[0].flatten(1) for i, o in enumerate(outputs)
    ]
    jacobian = torch.stack(rows, 1)
    return torch.linalg.matrix_norm(jacobian, 2) if jacobian.shape[1] > jacobian.shape[2] else _by_gram(jacobian)


def _by_gram(jacobian: Tensor) -> Tensor:
    """sqrt of the largest eigenvalue of J J^T, in float64 since the product squares the condition number."""
    gram = jacobian.double() @ jacobian.double().mT
    return torch.linalg.eigvalsh(gram)[..., -1].clamp_min(0).sqrt().to(jacobian.dtype)
