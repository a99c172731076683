"""The target answers prompts in batches: training text that is the target's own. B rows, T positions."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from twofold.data.conversations import Conversation, load_conversations, save_conversations
from twofold.models.causal_lm import CausalLM
from twofold.ops.sampling import Sampling, choose


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    max_new_tokens: int = 256
    temperature: float = 0.7
    min_p: float = 0.0
    batch_size: int = 64

    def __post_init__(self) -> None:
        if min(self.max_new_tokens, self.batch_size) < 1:
            raise ValueError(
                f"max_new_tokens = {self.max_new_tokens}, batch_size = {self.batch_size}: each is 1 or more"
            )
        Sampling(temperature=self.temperature, min_p=self.min_p)  # has checks of its own


@torch.inference_mode()
def generate(
    model: CausalLM,
    prompts: Sequence[list[int]],
    config: GenerateConfig,
    seed: int,
    report: Callable[[int, int, str], None],
    folder: Path | None = None,
) -> list[Conversation]:
    """One answer to each prompt, in order, ending with an EOS token or after `max_new_tokens`.

    An answer depends on its prompt and its number alone (noise by (seed + number, position)), up to rounding not on
    the batch that it was made in. Prompts of like length share a batch. A `folder` keeps the batches that are done: the
    same call goes on behind them.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    sampling = Sampling(temperature=config.temperature, min_p=config.min_p)
    for start in range(0, len(order), config.batch_size):
        numbers = order[start : start + config.batch_size]
        kept = None if folder is None else folder / f"batch-{seed}-{start}.safetensors"
        if kept is None or not kept.exists():
            seeds = torch.tensor([seed + i for i in numbers], device=model.device)
            batch = _answer([prompts[i] for i in numbers], model, config.max_new_tokens, sampling, seeds)
            if kept is not None:
                _keep([Conversation(prompts[i], answer) for i, answer in zip(numbers, batch, strict=True)], kept)
        else:
            batch = [conversation.answer_ids for conversation in load_conversations(kept)]
        answers.update(zip(numbers, batch, strict=True))
        tokens = sum(map(len, answers.values()))
        report(len(answers), len(prompts), f"{tokens / len(answers):.0f} tokens an answer")
    return [Conversation(list(prompts[i]), answers[i]) for i in range(len(prompts))]


def _keep(made: list[Conversation], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # what has its name is whole
    save_conversations(made, temporary)
    os.replace(temporary, path)


def _answer(
    prompts: list[list[int]], model: CausalLM, max_new_tokens: int, sampling: Sampling, seeds_B: Tensor
) -> list[list[int]]:
    device = model.device
    lengths_B = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(lengths_B.max())
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    state = model.new_state(len(prompts), longest + max_new_tokens)
    hidden, _ = model(ids.to(device), state=state, keep=lengths_B)
    state.commit(lengths_B)  # padding on the right is never committed
    state.know(longest, exact=len(prompts) == 1)
    last = hidden[torch.arange(len(prompts), device=device), lengths_B - 1].unsqueeze(1)
    tokens = choose(model.logits(last), state.lengths_B[:, None], sampling, seeds_B)
    eos = torch.tensor(model.config.eos_token_ids, device=device)
    rows = torch.arange(len(prompts), device=device)  # the batch shrinks as answers end
    out = torch.zeros(len(prompts), max_new_tokens, dtype=torch.long, device=device)
    sizes = torch.full((len(prompts),), max_new_tokens, device=device)
    alive = torch.ones(len(prompts), dtype=torch.bool, device=device)
    for step in range(max_new_tokens):
        out[rows, step] = tokens[:, 0]
        ended = torch.isin(tokens[:, 0], eos) & alive
        sizes[rows[ended]] = step + 1
        alive = alive & ~ended
        if step % 16 == 15:
            kept = alive.nonzero().flatten()
            if len(kept) == 0:
                break
            if len(kept) <= 0.75 * len(alive):
                state.select(kept)
                rows, tokens, seeds_B, alive = rows[kept], tokens[kept], seeds_B[kept], alive[kept]
        if step + 1 < max_new_tokens:
            hidden, _ = model(tokens, state=state)
            state.commit(1)
            tokens = choose(model.logits(hidden), state.lengths_B[:, None], sampling, seeds_B)
    return [row[:size].tolist() for row, size in zip(out.cpu(), sizes.tolist(), strict=True)]
