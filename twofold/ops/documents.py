"""Packed documents: several conversations in one row that do not see each other. B rows, T tokens, N documents."""

from functools import cached_property

import torch
from torch import Tensor


class Documents:
    """Which document each token of a pass belongs to; what follows from that is made once, when it is asked for.

    `most`, no fewer documents than the pass has, gives what follows a shape that does not depend on how many there are,
    so that the host waits for nothing, as in a CUDA graph.
    """

    def __init__(self, ids_BT: Tensor, most: int | None = None) -> None:
        self.ids_BT = ids_BT
        self.most = most

    @cached_property
    def causal_mask(self) -> Tensor:
        return causal_document_mask(self.ids_BT)

    @cached_property
    def borders(self) -> Tensor:
        """int32 [N + 1]: where documents start when the rows stand one behind the other, and where the last ends. With
        `most` it is [most + 1], the end repeated: empty documents follow."""
        starts_BT = torch.ones_like(self.ids_BT, dtype=torch.bool)
        starts_BT[:, 1:] = self.ids_BT[:, 1:] != self.ids_BT[:, :-1]
        starts_M, total = starts_BT.flatten(), starts_BT.numel()
        if self.most is None:
            starts_N = starts_M.nonzero().flatten()
            return torch.cat((starts_N, starts_N.new_tensor([total]))).int()
        number_M = torch.where(starts_M, starts_M.cumsum(dim=0) - 1, self.most)
        begin_M = torch.where(starts_M, torch.arange(total, device=starts_M.device), total)
        ends = torch.full((self.most + 1,), total, device=starts_M.device)
        return ends.scatter_(0, number_M, begin_M).int()

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document; with `most` those of a row, no fewer."""
        return int(self.borders.diff().max()) if self.most is None else self.ids_BT.shape[1]


def document_ids(positions_BT: Tensor) -> Tensor:
    """Number of the document of each token in a packed row: a position of 0 starts a new document."""
    return (positions_BT == 0).cumsum(dim=1)


def most_documents(positions_NT: Tensor, batch_rows: int) -> int:
    """How many documents any `batch_rows` of the packed rows have at most."""
    count_N = document_ids(positions_NT)[:, -1] + (positions_NT[:, 0] != 0)
    return int(count_N.topk(min(batch_rows, len(count_N))).values.sum())


def causal_document_mask(documents_BT: Tensor) -> Tensor:
    """[B, T, T]: true where the key is in the query's document and not after the query."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()
