"""A captured cycle of layers, each kernel launched before the last has ended, equals the same kernels one by one."""

import pytest
import torch
from torch import Tensor

from tests.ops.decode.test_packed_weight import random_weight
from twofold.ops.decode.packed_weight import PackedWeight
from twofold.ops.norms import rotary_table

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, WIDTH = 16, 512, 128
HEADS, KEY_HEADS = 4, 2
CHANNELS = (2 * KEY_HEADS + HEADS) * WIDTH


class Layers:
    """A Gated DeltaNet layer, an attention layer, their commit; all state in place."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.mixed = random_weight("w4", CHANNELS + HEADS * WIDTH, HIDDEN)[0]
            self.rates = random_weight("bf16", 2 * HEADS, HIDDEN)[0]
            self.out = random_weight("w4", HIDDEN, HEADS * WIDTH)[0]
            self.qkv = random_weight("w4", (2 * HEADS + 2 * KEY_HEADS) * WIDTH, HIDDEN)[0]
            self.gate_up = random_weight("w4", 2048, HIDDEN, gated=True)[0]
            self.down = random_weight("w4", HIDDEN, 1024)[0]
            self.head = random_weight("w4", 4096, HIDDEN)[0]
            self.norm, self.head_norm = torch.rand(HIDDEN).bfloat16(), torch.rand(WIDTH).bfloat16()
            self.weight = torch.randn(CHANNELS, 4).bfloat16()
            self.a_log, self.dt = torch.rand(HEADS), torch.rand(HEADS)
            self.table = rotary_table(torch.arange(256), 64, 1e4)
            self.state = torch.zeros(1, HEADS, WIDTH, WIDTH)
            self.conv = torch.zeros(1, 3, CHANNELS, dtype=torch.bfloat16)
            self.keys, self.values = torch.zeros(2, 1, 256, KEY_HEADS, WIDTH, dtype=torch.bfloat16)
            self.length = torch.zeros(1, dtype=torch.int64)

    def reset(self) -> None:
        for x in (self.state, self.conv, self.keys, self.values, self.length):
            x.zero_()

    def cycle(self, x: Tensor, n: Tensor, overlap: bool) -> tuple[Tensor, Tensor]:
        from twofold.ops.decode import attention_triton, delta_triton, linear_cuda, norms_triton

        def product(
            x: Tensor, weight: PackedWeight, norm: Tensor | None = None, residual: Tensor | None = None
        ) -> Tensor:
            return linear_cuda.packed_linear(x, weight, norm_K=norm, eps=1e-6, residual_MN=residual, overlap=overlap)

        qkv, z = product(x, self.mixed, self.norm)[None].split((CHANNELS, HEADS * WIDTH), dim=-1)
        b, a = product(x, self.rates, self.norm)[None].chunk(2, dim=-1)
        o, factors = delta_triton.delta_window(
            qkv, self.conv, self.weight, a, b, self.a_log, self.dt, self.state, overlap=overlap
        )
        o = norms_triton.gated_rms_norm(o, z.unflatten(-1, (HEADS, -1)), self.head_norm, 1e-6, overlap=overlap)
        x = product(o.view(TOKENS, -1), self.out, residual=x)
        x = product(product(x, self.gate_up, self.norm), self.down, residual=x)
        q, k, v = product(x, self.qkv, self.norm)[None].split((2 * HEADS * WIDTH, 256, 256), dim=-1)
        q, gate = q.unflatten(-1, (HEADS, -1)).chunk(2, dim=-1)
        k, v = (y.unflatten(-1, (KEY_HEADS, -1)) for y in (k, v))
        norms = self.head_norm, self.head_norm
        q = attention_triton.store_keys(
            q, k, v, *norms, 1e-6, *self.table, self.length, self.keys, self.values, overlap=overlap
        )
        o = attention_triton.decode_attention(q, self.keys, self.values, self.length, gate_BTHD=gate, overlap=overlap)
        x = product(o.view(TOKENS, -1), self.out, residual=x)
        ids, _ = linear_cuda.top1(
            norms_triton.rms_norm(x, self.norm, 1e-6, overlap=overlap), self.head, overlap=overlap
        )
        delta_triton.commit_delta_(self.state, factors, n, overlap=overlap)
        delta_triton.commit_convolution_(self.conv, qkv, n, overlap=overlap)
        self.length.add_(n)
        return ids, x


@pytest.mark.parametrize("overlap", [False, True])
def test_captured_cycle(overlap: bool) -> None:
    layers = Layers()
    torch.manual_seed(1)
    inputs = torch.randn(12, TOKENS, HIDDEN, device="cuda").bfloat16() * 0.1
    counts = torch.randint(0, TOKENS + 1, (12, 1), device="cuda")
    expected = [tuple(y.clone() for y in layers.cycle(x, n, False)) for x, n in zip(inputs, counts, strict=True)]
    state = layers.state.clone()
    x, n = inputs[0].clone(), counts[0].clone()
    layers.cycle(x, n, overlap)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers.cycle(x, n, overlap)
    layers.reset()
    for i in range(12):
        x.copy_(inputs[i])
        n.copy_(counts[i])
        graph.replay()
        assert torch.equal(found[0], expected[i][0])
        assert torch.equal(found[1], expected[i][1])
    assert torch.equal(layers.state, state)
    assert bool(state.isfinite().all())
    assert float(state.abs().max()) > 0
