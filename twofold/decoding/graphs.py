"""A decode cycle captured as one CUDA graph, and read a cycle late; a short prompt's prefill captured as another.

Replaying costs the host one call, so the device never waits for it: while cycle i + 1 runs, the host reads what cycle
i gained. A stop that it finds there comes too late for cycle i + 1, whose tokens are dropped. On a device without
graphs the same buffers go through the same function, call by call.

A prefill of up to some thousand tokens takes the host longer to launch than the device to run. Prompts are filled up to
one of a few sizes (`Kernels.prefill_sizes`), each captured when it is met for the second time: the first time its
kernels are compiled. What a graph holds is what its pass needs at once, for all graphs of a `CapturedCycle` together
that of the largest, and prompts beyond the sizes are launched call by call.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twofold.decoding.step import (
    Accept,
    Cycle,
    Rows,
    agreed,
    decode_cycle,
    filled_size,
    new_rows,
    prefill,
    prefill_filled,
    until,
)
from twofold.models.causal_lm import CausalLM
from twofold.models.drafter import Drafter
from twofold.ops.sampling import Sampling

WARM_UPS = 3  # kernels are compiled, tuned and given their workspaces before the capture
IN_FLIGHT = 2  # cycles whose results the host has not read


@dataclass
class _FilledPrefill:
    """The inputs of a prefill of one size, in place, and the graph once it is captured."""

    prompts_BT: Tensor
    counts_B: Tensor
    graph: torch.cuda.CUDAGraph | None = None
    warm: bool = False


class CapturedCycle:
    """`decode_cycle` over B rows of one capacity, with the graph that replays it.

    `max_length` positions cover prompt and answer; what cycles in flight may write past them is added. The sampling is
    part of the graph, but for its seed. `num_tokens` is the block (1: plain decoding); None takes the drafter's. Cycles
    that do not run at the same time can share `rows`.
    """

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        max_length: int,
        sampling: Sampling,
        *,
        batch_size: int = 1,
        num_tokens: int | None = None,
        accept: Accept = agreed,
        rows: Rows | None = None,
    ) -> None:
        self.target, self.drafter, self.sampling, self.accept = target, drafter, sampling, accept
        block = 1 if drafter is None else drafter.config.block_size
        self.num_tokens = num_tokens or block
        self.max_length = max_length
        self.rows = rows or new_rows(target, drafter, batch_size, max_length + (IN_FLIGHT + 1) * block)
        assert self.rows.state.max_length >= max_length + (IN_FLIGHT + 1) * block
        self._cuda = target.device.type == "cuda"
        self._ring = [torch.empty_like(self.rows.emitted_BN, device="cpu", pin_memory=self._cuda) for _ in range(3)]
        self._events = [torch.cuda.Event() for _ in self._ring] if self._cuda else []
        self._launched = 0
        self._unread: deque[int] = deque()
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None  # the graphs never run at the same time
        self._prefills: dict[int, _FilledPrefill] = {}
        self._graph = self._capture() if self._cuda else None

    def _run(self) -> None:
        rows = self.rows
        rows.know(rows.state.max_length - self.num_tokens, exact=False)  # every pass looks at the whole capacity
        decode_cycle(self.target, self.drafter, rows, self.sampling, self.num_tokens, scores=False, accept=self.accept)

    def _capture(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self.rows.reset(0)
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # other threads may go on with their work
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            self._run()
        return graph

    def _prefill(self, prompts_BT: Tensor, size: int) -> None:
        """Of prompts filled up to `size`, over empty rows."""
        batch, length = prompts_BT.shape
        if size not in self._prefills:
            prompts = torch.zeros(batch, size, dtype=torch.long, device=self.target.device)
            self._prefills[size] = _FilledPrefill(prompts, torch.zeros_like(prompts[:, 0]))
        held = self._prefills[size]
        held.prompts_BT[:, :length].copy_(prompts_BT)
        held.counts_B.fill_(length)
        inputs = self.target, self.drafter, self.rows, held.prompts_BT, held.counts_B, self.sampling
        if held.graph is None and held.warm and self._cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                prefill_filled(*inputs)
            held.graph = graph
        if held.graph is None:
            prefill_filled(*inputs)
            held.warm = True
        else:
            held.graph.replay()
        self.rows.know(length, exact=True)

    def start(self, prompts_BT: Tensor, seed: int) -> Tensor:
        """Empties the rows, runs the prompts and returns the first tokens [B], on the device."""
        if prompts_BT.shape[1] >= self.max_length:
            raise ValueError(
                f"{prompts_BT.shape[1]} tokens fill a capacity of {self.max_length}; capture a larger cycle"
            )
        self._unread.clear()
        self.rows.reset(seed)
        size = filled_size(self.target, prompts_BT.shape[1])
        if size is None:
            prefill(self.target, self.drafter, self.rows, prompts_BT, self.sampling)
        else:
            self._prefill(prompts_BT, size)
        return self.rows.anchors_B

    def launch(self) -> None:
        """Sends off one cycle and the copy of what it gains; waits for nothing."""
        assert len(self._unread) < len(self._ring), "read before launching more"
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()
        place = self._launched % len(self._ring)
        self._ring[place].copy_(self.rows.emitted_BN, non_blocking=True)
        if self._cuda:
            self._events[place].record()
        self._unread.append(place)
        self._launched += 1

    def read(self) -> list[list[int]]:
        """What the oldest unread cycle gained, for each row; waits until it is done."""
        place = self._unread.popleft()
        if self._cuda:
            self._events[place].synchronize()
        return [tokens[:gained] for gained, *tokens in self._ring[place].tolist()]

    def decode(
        self, prompt_ids: Sequence[int], max_tokens: int, seed: int, stop_ids: frozenset[int] = frozenset()
    ) -> Iterator[Cycle]:
        """`step.decode` of one row, without scores: the same tokens, a cycle late."""
        assert len(self.rows.anchors_B) == 1
        if len(prompt_ids) + max_tokens > self.max_length:
            raise ValueError(
                f"{len(prompt_ids)} + {max_tokens} tokens exceed a capacity of {self.max_length}; "
                "capture a larger cycle"
            )

        def cycles() -> Iterator[Cycle]:
            first = self.start(torch.tensor([list(prompt_ids)], device=self.target.device), seed)
            yield Cycle(first.tolist(), None, 0)
            self.launch()
            while True:
                self.launch()
                (token_ids,) = self.read()
                yield Cycle(token_ids, None, len(token_ids) - 1)

        return until(cycles(), max_tokens, stop_ids)
