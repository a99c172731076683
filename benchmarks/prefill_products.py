"""From how many rows on a packed weight is better unpacked: microseconds of the ways to multiply, by shape and rows.

    python benchmarks/prefill_products.py

`packed` reads the weight of 4 bits once for every 32 rows, `unpacked` writes it in bfloat16 and leaves the product to
cuBLAS, `dense` is that product alone, as of weights kept dense. Inside captured graphs, cold weights; Qwen3.5-4B's
shapes. `ops.decode.products.FEW_ROWS` is the limit up to which the first is taken. Takes less than 40 s on an H200.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from decode_kernels import PRODUCTS, copies, microseconds, random_weight
from torch import Tensor

from twofold.ops.decode import linear_cuda
from twofold.ops.decode.packed_weight import PackedWeight

NAMES = ("gdn qkv z", "out", "gate up", "down", "attention q g k v")


def unpacked(x_MK: Tensor, weight: PackedWeight) -> Tensor:
    return F.linear(x_MK, linear_cuda.unpack(weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    given = parser.parse_args()
    totals = {rows: [0.0, 0.0, 0.0] for rows in given.rows}
    for name in NAMES:
        outputs, inputs, bits, group, _, gated, _, count = PRODUCTS[name]
        first = random_weight(outputs, inputs, bits, group, gated)
        weights = [first, *(random_weight(outputs, inputs, bits, group, gated) for _ in range(copies(first.num_bytes)))]
        dense = [torch.randn(outputs, inputs, device="cuda").bfloat16() for _ in range(copies(2.0 * outputs * inputs))]
        for rows in given.rows:
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            us = (
                microseconds([partial(linear_cuda.packed_linear, x, weight) for weight in weights]),
                microseconds([partial(unpacked, x, weight) for weight in weights]),
                microseconds([partial(F.linear, x, weight) for weight in dense]),
            )
            totals[rows] = [total + count * one for total, one in zip(totals[rows], us, strict=True)]
            print(f"{name:<20}{rows:>5} rows: packed {us[0]:>7.1f}  unpacked {us[1]:>7.1f}  dense {us[2]:>7.1f} us")
    for rows, (packed, loose, kept) in totals.items():
        print(
            f"{'a whole pass':<20}{rows:>5} rows: packed {packed:>7.0f}  unpacked {loose:>7.0f}  dense {kept:>7.0f} us"
        )


if __name__ == "__main__":
    main()
