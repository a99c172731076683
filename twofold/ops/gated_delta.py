"""The gated delta rule (Gated DeltaNet), its verify window and its commit.

B batch, T tokens, H value heads, K key width, V value width; C chunks of L tokens.

With log decay g_t <= 0, write strength beta_t, and k_t, q_t of unit length (q also over sqrt(K)):

    u_t = beta_t (v_t - (e^{g_t} S_{t-1})^T k_t)        what is written
    S_t = e^{g_t} S_{t-1} + k_t u_t^T                   the state, [K, V], float32
    o_t = S_t^T q_t                                     what is read

Within a chunk that starts at state S_0, with G_t the running sum of g, the writes solve a triangular system,
(I + A) U = beta (V - e^G K S_0) with A_{tj} = beta_t e^{G_t - G_j} k_t.k_j for j < t, and

    S_n = e^{G_n} S_0 + sum_{j <= n} e^{G_n - G_j} k_j u_j^T        for every n,

so a pass keeps (k, u, G) and can still end after any of its tokens. arXiv:2412.06464, and docs/design.md.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class DeltaWindow(NamedTuple):
    """What `commit_delta` needs to end a pass after any of its tokens."""

    start_BHCKV: Tensor
    k_BHCLK: Tensor
    u_BHCLV: Tensor
    decay_BHCL: Tensor  # G, the running sum of g inside its chunk


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def _heads_first(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Float32 at least, unit q and k, each key head repeated for its value heads, heads before time."""
    wide = torch.promote_types(v_BTHV.dtype, torch.float32)
    repeat = v_BTHV.shape[2] // k_BTHK.shape[2]
    q = _unit(q_BTHK.to(wide)) * q_BTHK.shape[-1] ** -0.5
    k = _unit(k_BTHK.to(wide))
    if repeat > 1:
        q, k = q.repeat_interleave(repeat, dim=2), k.repeat_interleave(repeat, dim=2)
    return (
        q.transpose(1, 2),
        k.transpose(1, 2),
        v_BTHV.to(wide).transpose(1, 2),
        g_BTH.to(wide).transpose(1, 2),
        beta_BTH.to(wide).transpose(1, 2),
    )


@torch.compiler.disable
def _inverse(mix_LL: Tensor) -> Tensor:
    return UnitTriangularInverse.apply(mix_LL)


def _commit_all(window: DeltaWindow, n: int) -> Tensor:
    chunk = max(n - 1, 0) // window.decay_BHCL.shape[-1]
    start, k, u, decay = (x[:, :, chunk] for x in window)
    n -= chunk * decay.shape[-1]
    if n == 0:
        return start
    total = decay[..., n - 1 : n]
    weight = (total - decay[..., :n]).exp()[..., None]
    return total.exp()[..., None] * start + (k[:, :, :n] * weight).transpose(-1, -2) @ u[:, :, :n]


def _solve(mix_LL: Tensor, rhs_LN: Tensor) -> Tensor:
    """(I + A)^-1 R for strictly lower triangular A. On a GPU by an explicit inverse: batched substitution is slow."""
    if mix_LL.is_cuda:
        return _inverse(mix_LL) @ rhs_LN
    return torch.linalg.solve_triangular(mix_LL, rhs_LN, upper=False, unitriangular=True)


def _scan(
    written_BHCLV: Tensor,
    erased_BHCLK: Tensor,
    k_end_BHCLK: Tensor,
    factor_BHC: Tensor,
    state_BHKV: Tensor | None,
    exact: bool,
) -> tuple[Tensor, Tensor]:
    """What one chunk hands to the next: the writes u [B, H, C, L, V], and the state before each chunk [B, H, C, K, V].

    The state after the last chunk is made by `commit_delta`.
    """
    heads = written_BHCLV.shape[:2]
    tensors = [x.flatten(0, 1) for x in (written_BHCLV, erased_BHCLK, k_end_BHCLK, factor_BHC)]
    first = None if state_BHKV is None else state_BHKV.flatten(0, 1)
    if written_BHCLV.is_cuda:
        from twofold.ops import scan_triton

        if scan_triton.fits(tensors[0], tensors[1], first):
            u, starts = scan_triton.ChunkScan.apply(*tensors, first, "ieee" if exact else "tf32")
            return u.unflatten(0, heads), starts.unflatten(0, heads)
    written, erased, k_end, factor = tensors
    state = written.new_zeros(len(written), k_end.shape[-1], written.shape[-1]) if first is None else first
    states, writes = [], []
    for c in range(written.shape[1]):
        states.append(state)
        writes.append(torch.baddbmm(written[:, c], erased[:, c], state, alpha=-1))
        if c + 1 < written.shape[1]:
            state = state * factor[:, c, None, None] + k_end[:, c].transpose(-1, -2) @ writes[-1]
    return torch.stack(writes, dim=1).unflatten(0, heads), torch.stack(states, dim=1).unflatten(0, heads)


class UnitTriangularInverse(torch.autograd.Function):
    """T = (I + A)^-1 for strictly lower triangular A [..., L, L]; dA = -T^T dT T^T, below the diagonal.

    Inverts diagonal blocks of 1, 2, 4, ... rows: of a block [[P, 0], [R, Q]] the lower left part of the inverse is
    -Q^-1 R P^-1. As stable as substitution, where a product of powers of A is not.
    """

    @staticmethod
    def forward(ctx: Any, mix: Tensor) -> Tensor:
        length = mix.shape[-1]
        size = 1 << (length - 1).bit_length()
        mix = F.pad(mix, (0, size - length, 0, size - length))
        inverse = torch.eye(size, dtype=mix.dtype, device=mix.device).expand(mix.shape).clone()
        half = 1
        while half < size:
            blocks = (size // (2 * half), 2, half)
            grid = inverse.unflatten(-1, blocks).unflatten(-4, blocks)  # [..., block, part, row, block, part, column]
            own = torch.diagonal(grid, dim1=-6, dim2=-3)  # [..., part, row, part, column, block]
            below = torch.diagonal(mix.unflatten(-1, blocks).unflatten(-4, blocks), dim1=-6, dim2=-3)
            p, q, r = (
                x.movedim(-1, -3) for x in (own[..., 0, :, 0, :, :], own[..., 1, :, 1, :, :], below[..., 1, :, 0, :, :])
            )
            own[..., 1, :, 0, :, :].copy_((-q @ r @ p).movedim(-3, -1))
            half *= 2
        inverse = inverse[..., :length, :length].contiguous()
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grads[0] @ transposed).tril(-1)


def gated_delta_recurrent(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The equations above, token by token: the specification. Returns (o [B, T, H, V], states [B, T, H, K, V])."""
    q, k, v, g, beta = _heads_first(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    state = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state_BHKV is None else state_BHKV
    outputs, states = [], []
    for t in range(k.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t]))
        state = state + k[:, :, t, :, None] * u[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
        states.append(state)
    return torch.stack(outputs, dim=1).to(v_BTHV.dtype), torch.stack(states, dim=1)


def gated_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> tuple[Tensor, DeltaWindow]:
    """The same in chunks, as matrix products; differentiable. Returns (o [B, T, H, V], window).

    `documents_BT` marks packed documents, which do not see each other: pairs across a border get weight 0, and
    so does the state that a chunk receives from another document.
    """
    num_tokens = k_BTHK.shape[1]
    if state_BHKV is not None and documents_BT is None and num_tokens <= CHUNK:
        return _one_chunk(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV)
    length = min(CHUNK, num_tokens)
    padding = -num_tokens % length
    chunks = (num_tokens + padding) // length

    def chunked(x_BHT: Tensor) -> Tensor:
        if padding:  # beta = 0 writes nothing and g = 0 decays nothing
            x_BHT = F.pad(x_BHT, (0, 0) * (x_BHT.dim() - 3) + (0, padding))
        return x_BHT.unflatten(2, (chunks, length))

    q, k, v, g, beta = map(chunked, _heads_first(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    decay = g.cumsum(dim=-1)
    from_start = decay.exp()  # weight of the chunk's first state at each token
    to_end = (decay[..., -1:] - decay).exp()  # weight of each token's write at the chunk's end
    causal = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    if documents_BT is not None:
        documents = F.pad(documents_BT, (0, padding), value=-1).unflatten(1, (chunks, length))[:, None]
        causal = causal & (documents[..., :, None] == documents[..., None, :])
        before = F.pad(documents[..., -1], (1, -1), value=-1)  # the document at the end of the chunk before
        # sums over the own document alone: a running sum would round by what the one before has added
        decay = (causal * g[..., None, :]).sum(dim=-1)
        from_start = decay.exp() * (documents == before[..., None])
        others = documents != documents[..., -1:]
        to_end = (decay[..., -1:] - decay).masked_fill(others, -torch.inf).exp()
    pair = (decay[..., :, None] - decay[..., None, :]).masked_fill(~causal, -torch.inf).exp()

    strength = beta[..., None]
    written, erased = strength * v, (strength * from_start[..., None]) * k
    if length > 1:
        mix = (strength * pair * (k @ k.transpose(-1, -2))).tril(-1)
        solved = _solve(mix, torch.cat((written, erased), dim=-1))
        written, erased = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    seen = pair * (q @ k.transpose(-1, -2))
    q_start = q * from_start[..., None]

    u, starts = _scan(written, erased, k * to_end[..., None], from_start[..., -1], state_BHKV, v_BTHV.itemsize > 2)
    window = DeltaWindow(starts, k, u, decay)
    o = (q_start @ window.start_BHCKV + seen @ window.u_BHCLV).flatten(2, 3)[:, :, :num_tokens]
    return o.transpose(1, 2).to(v_BTHV.dtype), window


def _one_chunk(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTH: Tensor, beta_BTH: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, DeltaWindow]:
    """A pass of one chunk, as decoding makes them, in as few operations as it takes: q and k go together."""
    batch, num_tokens, key_heads, width = k_BTHK.shape
    wide = state_BHKV.dtype
    repeat = v_BTHV.shape[2] // key_heads
    qk = _unit(torch.stack((q_BTHK, k_BTHK), dim=2).to(wide)).permute(0, 3, 2, 1, 4)  # [B, H / repeat, 2, T, K]
    qk = qk[:, :, None].expand(-1, -1, repeat, -1, -1, -1).reshape(batch, -1, 2 * num_tokens, width)
    k = qk[:, :, num_tokens:]
    read_q, read_k = (qk @ state_BHKV).split(num_tokens, dim=2)
    dot_q, dot_k = (qk @ k.transpose(-1, -2)).split(num_tokens, dim=2)
    decay = g_BTH.to(wide).transpose(1, 2).cumsum(dim=-1)
    pair = (decay[..., :, None] - decay[..., None, :] + _future(num_tokens, wide, k.device)).exp()
    from_start, strength = decay.exp()[..., None], beta_BTH.to(wide).transpose(1, 2)[..., None]
    u = strength * (v_BTHV.to(wide).transpose(1, 2) - from_start * read_k)
    if num_tokens > 1:
        u = _solve(strength * pair * dot_k, u)
    o = (from_start * read_q + (pair * dot_q) @ u) * width**-0.5
    window = DeltaWindow(*(x.unsqueeze(2) for x in (state_BHKV, k, u, decay)))
    return o.transpose(1, 2).to(v_BTHV.dtype), window


@functools.cache
def _future(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[T, T]: -inf above the diagonal, 0 elsewhere."""
    with torch.inference_mode(False):
        return torch.full((length, length), -torch.inf, dtype=dtype, device=device).triu(1)


def commit_delta(window: DeltaWindow, n_B: Tensor | int) -> Tensor:
    """S_n [B, H, K, V] for n tokens of the pass, 0 <= n <= T, one number or one for each row."""
    start, k, u, decay = window
    if isinstance(n_B, int):
        return _commit_all(window, n_B)
    batch, _, chunks, length = decay.shape
    if chunks > 1:
        chunk_B = (n_B - 1).clamp(min=0) // length
        rows = torch.arange(batch, device=n_B.device)
        start, k, u, decay = (x.transpose(1, 2)[rows, chunk_B] for x in (start, k, u, decay))
        n_B = n_B - chunk_B * length
    else:
        start, k, u, decay = (x.squeeze(2) for x in (start, k, u, decay))
    index = (n_B - 1).clamp(min=0)[:, None, None].expand(-1, decay.shape[1], 1)
    total = torch.where(n_B[:, None, None] > 0, decay.gather(-1, index), 0.0)  # G_n, with G_0 = 0
    token = torch.arange(length, device=n_B.device)
    weight = (total - decay).masked_fill(token >= n_B[:, None, None], -torch.inf).exp()
    return total[..., None].exp() * start + (k * weight[..., None]).transpose(-1, -2) @ u
