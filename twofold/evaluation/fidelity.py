"""How near a quantized model is to its teacher, on text neither was tuned on."""

import torch

from twofold.data.conversations import PackedRows
from twofold.models.causal_lm import CausalLM

_AT_ONCE = 2**24  # logits


@torch.no_grad()
def fidelity(model: CausalLM, teacher: CausalLM, rows: PackedRows, batch_rows: int = 8) -> dict[str, float]:
    """Means over the answers' tokens in `rows`, each predicted from what is before it.

    kl: sum_v p log(p / q) in nats, p the teacher's; top1: share of tokens with the same argmax;
    ppl: exp of the mean of -log q(token).
    """
    kl = agree = nll = 0.0
    count = 0
    for chosen in torch.arange(len(rows)).split(batch_rows):
        batch = rows.select(chosen).to(model.device)
        ids, positions = batch.token_ids_NT, batch.positions_NT
        counted = batch.answer_NT[:, 1:] & (positions[:, 1:] > 0)
        hidden = (m(ids, positions)[0][:, :-1][counted] for m in (model, teacher))
        some = max(1, _AT_ONCE // model.config.vocab_size)
        for q_MD, p_MD, token_M in zip(*(x.split(some) for x in (*hidden, ids[:, 1:][counted])), strict=True):
            log_q, log_p = (m.logits(x).double().log_softmax(dim=-1) for m, x in ((model, q_MD), (teacher, p_MD)))
            kl += float((log_p.exp() * (log_p - log_q)).sum())
            agree += float((log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).sum())
            nll -= float(log_q.gather(1, token_M[:, None]).sum())
            count += len(token_M)
    return {"kl": kl / count, "top1": agree / count, "ppl": float(torch.tensor(nll / count).exp())}


def prefill_fidelity(model: CausalLM, eight_bits: CausalLM, rows: PackedRows, batch_rows: int = 8) -> dict[str, float]:
    """What a prefill with 8-bit floats costs: `fidelity` of the second model, whose kernels multiply so, to the first,
    which has the same weights. Freezes both. The head sees one row of a prefill, so it is the first model's.

    Rows of more tokens than `FEW_ROWS` of the GPU's kernels are needed there, else nothing is multiplied in 8 bits.
    """
    model.freeze()
    eight_bits.freeze()
    eight_bits.head.frozen = model.head.frozen
    return fidelity(eight_bits, model, rows, batch_rows)
