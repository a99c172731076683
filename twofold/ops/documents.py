"""Packed documents: several conversations in one row that do not see each other. B rows, T tokens, N documents."""

from functools import cached_property

import torch
from torch import Tensor


class Documents:
    """Which document each token of a pass belongs to; what follows from that is made once, when it is asked for."""

    def __init__(self, ids_BT: Tensor) -> None:
        self.ids_BT = ids_BT

    @cached_property
    def causal_mask(self) -> Tensor:
        return causal_document_mask(self.ids_BT)

    @cached_property
    def borders(self) -> Tensor:
        """int32 [N + 1]: where documents start when the rows stand one behind the other, and where the last ends."""
        starts_BT = torch.ones_like(self.ids_BT, dtype=torch.bool)
        starts_BT[:, 1:] = self.ids_BT[:, 1:] != self.ids_BT[:, :-1]
        starts_N = starts_BT.flatten().nonzero().flatten()
        return torch.cat((starts_N, starts_N.new_tensor([starts_BT.numel()]))).int()

    @cached_property
    def longest(self) -> int:
        return int(self.borders.diff().max())


def document_ids(positions_BT: Tensor) -> Tensor:
    """Number of the document of each token in a packed row: a position of 0 starts a new document."""
    return (positions_BT == 0).cumsum(dim=1)


def causal_document_mask(documents_BT: Tensor) -> Tensor:
    """[B, T, T]: true where the key is in the query's document and not after the query."""
    same = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same.tril()
