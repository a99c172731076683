"""What a CUDA graph does, on a CPU: the operations of a call are kept with the tensors they read and wrote, and done
again on the same tensors. What was a number of the host then is that number for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twofold.training.step import WARM_UPS, TrainingStep

ATEN = torch.ops.aten
WAITS = {ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN.is_nonzero, ATEN.lift_fresh}


class Recorder(TorchDispatchMode):
    """RuntimeError for what would make the host wait for a GPU, or copies a number of the host to it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = args[1] if func.overloadpacket in (ATEN.index, ATEN.index_put, ATEN.index_put_) else ()
        if func.overloadpacket in WAITS or any(i is not None and i.dtype == torch.bool for i in indices):
            raise RuntimeError(f"{func} in a captured part")
        found = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, found in self.calls:
            for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # else a view, or changed in place
                    old.copy_(new)


class Replayed:
    """As `step._Replayed`; that recording runs a call, where a capture does not, makes one replay less."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.recorder, self.calls = function, Recorder(), 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls <= WARM_UPS:
            self.function()
        elif self.calls == WARM_UPS + 1:
            with self.recorder:
                self.function()
        else:
            self.recorder.replay()


class ReplayedStep(TrainingStep):
    def __init__(self, *arguments: Any, captured: bool) -> None:
        super().__init__(*arguments, captured=captured)
        if captured:
            self._differentiate, self._change = Replayed(self._make_gradient), Replayed(self._update)
