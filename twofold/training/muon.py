"""Muon (K. Jordan et al., 2024): momentum whose steps are orthogonal matrices, and AdamW for what is no matrix.

N, K a matrix's sizes.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
TERMS = (3.4445, -4.7750, 2.0315)  # of the quintic that draws singular values to within 0.7 and 1.2
ITERATIONS = 5


def orthogonalized(x_BNK: Tensor) -> Tensor:
    """U V^T of x = U S V^T for each of B matrices, about: singular values end between 0.7 and 1.2.

    Newton-Schulz, x <- a x + (b x x^T + c (x x^T)^2) x, in the dtype of x.
    """
    tall = x_BNK.shape[-2] > x_BNK.shape[-1]
    x = x_BNK.mT if tall else x_BNK
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = TERMS
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """m <- 0.95 m + g,  W <- W - lr (0.2 sqrt(max(N, K)) orthogonalized(g + 0.95 m) + weight_decay W).

    The factor gives a step the size that AdamW's have, so that both take the same learning rates (arXiv:2502.16982).
    Matrices of one shape are taken together, on a GPU in bfloat16. What has fewer or more than two dimensions is
    optimized by AdamW. Step counts stay on the parameters' device, and rates may: a CUDA graph of `step` reads them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape if p.dim() == 2 else torch.Size()].append(p)
            for shape, parameters in shapes.items():
                if group["weight_decay"]:
                    torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                if shape:
                    self._step_matrices(parameters, group["lr"])
                else:
                    self._step_others(parameters, group)

    def _step_matrices(self, parameters: list[Tensor], rate: Tensor | float) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        moments = [self.state[p]["momentum"] for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(moments, MOMENTUM)
        torch._foreach_add_(moments, gradients)
        ahead = torch.stack(torch._foreach_add(gradients, moments, alpha=MOMENTUM))
        steps = orthogonalized(ahead.bfloat16() if ahead.is_cuda else ahead).to(ahead.dtype)
        torch._foreach_sub_(parameters, list(steps * (rate * 0.2 * max(parameters[0].shape) ** 0.5)))

    def _step_others(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        (first, second), rate = group["betas"], group["lr"]
        for p in parameters:
            state, gradient = self.state[p], p.grad
            assert gradient is not None
            if not state:
                new = torch.zeros_like
                state |= {"step": torch.zeros((), device=p.device), "exp_avg": new(p), "exp_avg_sq": new(p)}
            state["step"] += 1
            taken = state["step"].double()
            state["exp_avg"].lerp_(gradient, 1 - first)
            state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
            spread = (state["exp_avg_sq"] / (1 - second**taken)).sqrt_().add_(group["eps"])
            p.sub_(state["exp_avg"] / spread * (rate / (1 - first**taken)))
