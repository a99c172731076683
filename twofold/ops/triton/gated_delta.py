"""The gated delta rule over whole rows by flash-linear-attention's chunked kernels (fla-core, MIT)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from twofold.ops import gated_delta as reference


def gated_delta(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    state_BHKV: Tensor | None = None,
    documents_BT: Tensor | None = None,
) -> tuple[Tensor, reference.DeltaWindow | None]:
    """`reference.gated_delta`; a pass without a state is trained on and never committed, so it has no window."""
    if state_BHKV is not None:
        return reference.gated_delta(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, state_BHKV, documents_BT)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    batch, num_tokens = k_BTHK.shape[:2]
    repeat = v_BTHV.shape[2] // k_BTHK.shape[2]
    dtype = torch.bfloat16
    q, k = (x.repeat_interleave(repeat, dim=2) for x in (q_BTHK, k_BTHK))
    q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v_BTHV, g_BTH, beta_BTH))
    o, _ = chunk_gated_delta_rule(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        g.float(),
        beta.float(),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=_borders(documents_BT, batch, num_tokens, q.device),
    )
    return o.view(v_BTHV.shape), None


def _borders(documents_BT: Tensor | None, batch: int, num_tokens: int, device: torch.device) -> Tensor:
    """Offsets of the documents in the flattened rows, and the end."""
    if documents_BT is None:
        return torch.arange(batch + 1, device=device, dtype=torch.int32) * num_tokens
    starts = F.pad(documents_BT[:, 1:] != documents_BT[:, :-1], (1, 0), value=True)
    offsets = starts.flatten().nonzero().flatten()
    return F.pad(offsets, (0, 1), value=batch * num_tokens).to(torch.int32)
