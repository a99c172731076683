"""A training step in two parts over tensors that stay where they are, so that a GPU can replay each as a CUDA graph.

    begin     inputs are copied in; loss, gradient, and the gradient's norm
    read      loss and norm, the only wait of a step; between `begin` and it the host has time of its own
    finish    the gradient is clipped, the optimizer steps

A step of a small model is thousands of kernels, which a host launches more slowly than a GPU runs them; a graph is one
launch. The first steps are called, on a side stream: they compile kernels, make the optimizer's state, and are steps
like any other. The next captures each part, which runs nothing, and replays it, as all later ones do. A graph knows
addresses, so parameters, optimizer state and rates are only ever changed in place. Its gradients lie in its pool of
memory, made anew by every replay; what runs between replays takes its memory elsewhere.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WARM_UPS = 3

Inputs = tuple[Tensor, ...]


class TrainingStep:
    """`loss_of(*inputs)` is the loss of inputs whose shapes never change. To be `captured` it must not make the host
    wait for the device, nor read from it; where the parameters are on a CPU nothing is captured."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        loss_of: Callable[..., Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float,
        *,
        captured: bool,
    ) -> None:
        self._parameters, self._loss_of, self._optimizer, self._clip = list(parameters), loss_of, optimizer, clip
        self._device = self._parameters[0].device
        self._inputs: Inputs = ()
        self._differentiate: Callable[[], None] = self._make_gradient
        self._change: Callable[[], None] = self._update
        if captured and self._device.type == "cuda":
            stream, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()
            self._differentiate = _Replayed(self._make_gradient, stream, pool)
            self._change = _Replayed(self._update, stream, pool)

    def begin(self, inputs: Inputs) -> None:
        """Waits for nothing. Inputs come from the host, or are on the device."""
        if not self._inputs:
            self._inputs = tuple(torch.empty_like(x, device=self._device) for x in inputs)
        for place, x in zip(self._inputs, inputs, strict=True):
            assert (place.shape, place.dtype) == (x.shape, x.dtype), "the inputs of all steps have the same shapes"
            pin = place.is_cuda and not x.is_cuda
            place.copy_(x.pin_memory() if pin else x, non_blocking=True)
        self._differentiate()

    def read(self) -> tuple[float, float]:
        """Loss, and norm of the gradient, which `grad` of the parameters holds until the next step."""
        loss, norm = self._seen.tolist()
        return loss, norm

    def finish(self) -> None:
        """Not to be called where loss or norm is not finite: the parameters would not be, either."""
        self._change()

    def _make_gradient(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        loss = self._loss_of(*self._inputs)
        loss.backward()
        self._norm = nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        self._seen = torch.stack((loss.detach().to(self._norm.dtype), self._norm))

    def _update(self) -> None:
        nn.utils.clip_grads_with_norm_(self._parameters, self._clip, self._norm)
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            for group in self._optimizer.param_groups:
                group["capturable"] = True  # PyTorch's AdamW asks for it; fused, with its state on the GPU, it is
        self._optimizer.step()


class _Replayed:
    """A function of nothing: called on the stream at first, then captured from it and replayed. Those of one pool are
    always called in the same order."""

    def __init__(self, function: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> None:
        self._function, self._stream, self._pool = function, stream, pool
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self._calls += 1
        if self._calls <= WARM_UPS:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._function()
            torch.cuda.current_stream().wait_stream(self._stream)
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # on the stream of the calls before: gradients are summed where they were the first time
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._function()
            self._graph = graph
        self._graph.replay()
