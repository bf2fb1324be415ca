"""Muon for matrices: momentum, orthogonalised by a Newton-Schulz iteration, scaled to Adam's step size.

`torch.optim.Muon` iterates in bfloat16, which is slow on processors without bfloat16 units; this one stays in float32
and treats all matrices of one shape in one batched product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for two-dimensional weights.

    Parameters
    ----------
    params
        Matrices only.
    lr
        Learning rate in Adam's units.
    momentum
        Nesterov momentum.
    weight_decay
        Decoupled decay.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for (rows, columns), weights in shapes.items():
                pushes = []
                for weight in weights:
                    buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    buffer.lerp_(weight.grad, 1 - group["momentum"])
                    pushes.append(weight.grad.lerp(buffer, group["momentum"]))
                scale = 0.2 * max(rows, columns) ** 0.5 * group["lr"]
                for weight, update in zip(weights, orthogonalise(torch.stack(pushes)), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of each matrix (k, m, n) towards 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x
