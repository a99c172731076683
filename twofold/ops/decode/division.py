"""How a product's work is divided over a GPU: warps, tiles, stages, slices of K, and what a block needs (linear.cu).

M rows, N outputs, K inputs in steps of `STEP`.
"""

from dataclasses import astuple, dataclass, replace

from twofold.ops.decode.packed_weight import STEP, PackedWeight

MAX_ROW_TILES = 4  # of 8 rows in a block
SHARED = 99 * 1024  # bytes that a block may have on sm_86
REGISTERS = 65536  # of a multiprocessor


@dataclass(frozen=True, kw_only=True)
class Config:
    """A block has `warps` that split its slice of K (of `split` slices), `tiles` of 16 outputs at once, `row_tiles` of
    8 rows, `stages` steps in flight; `blocks` fit on a multiprocessor, and no more are launched."""

    warps: int
    tiles: int
    row_tiles: int
    stages: int
    blocks: int = 1
    split: int = 1


def choose(weight: PackedWeight, rows: int, whole: bool = False, most: int = SHARED) -> Config:
    """`warps` and `split` depend on the weight's shape alone: a row has the same bits whatever stands beside it.
    `whole`: K is not split over blocks (top-1 and tails). `most`: bytes of shared memory that a block may have. What
    was fastest on an H200, in INT4 with 1, 16, 32 and 64 rows (a head of these sizes with 1 and 16)."""
    warps, split = _order(weight, whole)
    row_tiles = 1 if rows <= 8 else 2 if rows <= 16 else MAX_ROW_TILES
    depth = -(-(weight.num_inputs // STEP) // (split * warps))  # steps of a warp
    tiles, stages = 1, depth if weight.words.shape[2] > 1 else 2 * depth
    most_stages = stages
    head = whole and weight.num_outputs >= 32768
    if weight.bits == 4 and warps == 16:
        row_tiles = row_tiles if split == 1 else min(row_tiles, 2)  # x of more rows does not stay in registers
        tiles = 2 if split == 4 and row_tiles == 2 else 1
        stages = 2 * depth if split == 1 else 4 if tiles == 2 else 3
    elif weight.bits == 4 and split == 4:
        tiles, stages = 2, 2 * depth
    elif weight.bits == 4 and weight.num_outputs >= 4096 and row_tiles > 2 and not head:
        row_tiles, tiles, stages = 2, 2, depth
    elif weight.bits == 4 and weight.num_outputs >= 4096 and row_tiles <= 2:  # x is read for some tiles at once
        tiles, stages = (2, 2 * depth) if head and row_tiles == 2 else (3, depth)
    config = Config(warps=warps, tiles=tiles, row_tiles=row_tiles, stages=stages, split=split)
    config = _fitted(weight, config, most_stages, most)
    twice = config.tiles * config.row_tiles <= 2 and warps <= 8 and depth <= 5
    return replace(config, blocks=2) if twice and 2 * shared_bytes(weight, config) <= 200 * 1024 else config


def _fitted(weight: PackedWeight, config: Config, most_stages: int, most: int) -> Config:
    """With fewer stages, tiles and rows, in this order, until a block's shared memory is at most `most`."""
    while shared_bytes(weight, config) > most:
        if config.stages > 2:
            config = replace(config, stages=config.stages - 1)
        elif config.tiles > 1:
            config = replace(config, tiles=1, stages=most_stages)
        elif config.row_tiles > 1:
            config = replace(config, row_tiles=config.row_tiles // 2, stages=most_stages)
        elif config.stages > 1:
            config = replace(config, stages=1)
        else:
            break
    return config


def _order(weight: PackedWeight, whole: bool) -> tuple[int, int]:
    """(warps, slices of K): the order of the sums."""
    steps = weight.num_inputs // STEP
    long = steps >= 64 and weight.num_outputs <= 4096 and not whole
    if long and weight.bits == 4:
        if steps < 128:  # by itself a row is faster with (16, 1), by 0.4 us; 16 rows are slower, by 1.5 us
            return 8, 4
        return 16, max((4, 3), key=lambda split: steps / (split * -(-steps // (16 * split))))  # the better filled
    split = -(-steps // 16) if long else 1
    if split == 1 and steps > 64:
        return 16, 1
    return 8 if steps // split >= 8 else max(1, steps // split // 2), split


def streams(weight: PackedWeight, config: Config) -> bool:
    """Whether a warp's part of x is too large to stay in registers."""
    depth = -(-weight.num_inputs // (STEP * config.split * config.warps))
    left = min(255, REGISTERS // (config.blocks * config.warps * 32) // 8 * 8)
    return depth * config.row_tiles * 8 + 24 + 12 * config.row_tiles * config.tiles > left


def reads_early(weight: PackedWeight, config: Config) -> bool:
    """Whether a warp takes a step's weights out of shared memory while it multiplies those before. Where registers are
    left for it."""
    whole = weight.num_inputs // STEP % (config.split * config.warps) == 0
    room = REGISTERS // (config.blocks * config.warps * 32) >= 255
    return whole and room and config.stages > 1 and weight.bits < 16 and not streams(weight, config)


def validate(weight: PackedWeight, config: Config, most: int) -> None:
    """ValueError where no multiprocessor can hold a block of this division of work, of `most` bytes."""
    steps = weight.num_inputs // STEP
    shared = shared_bytes(weight, config)
    if min(astuple(config)) < 1 or config.warps > 32 or config.split > steps:
        raise ValueError(f"{config} for {steps} steps: every number is 1 or more, at most 32 warps and {steps} slices")
    if shared > most:
        raise ValueError(f"{config} needs {shared} bytes of shared memory, a block has {most}; use fewer stages")
    if config.blocks * config.warps > 64:
        raise ValueError(f"{config} has more than 64 warps on a multiprocessor; use fewer blocks")


def shared_bytes(weight: PackedWeight, config: Config) -> int:
    """As linear.cu divides it: the ring of weights and scales, two sets of partial sums, where the sums of a scale
    group start, the norm's weight, squares."""
    threads = config.warps * 32
    words = 0 if weight.scales is None else weight.scales.shape[-1]
    rows = config.row_tiles * 8
    depth = -(-weight.num_inputs // (STEP * config.split * config.warps))
    ring = threads * config.stages * config.tiles * (16 * weight.words.shape[2] + 4 * words)
    sums = 2 * threads * config.tiles * config.row_tiles * 16
    parts = 0 if weight.scales is None else 2 if weight.group_size == 32 else 1
    starts = config.warps * depth * parts * config.row_tiles * 64
    return ring + sums + starts + config.warps * depth * 128 + (config.warps + 1) * rows * 4


def partial_sizes(weight: PackedWeight, config: Config, rows: int) -> tuple[int, int]:
    """(bytes of partial sums, counters) that slices of K leave for each other."""
    tiles = weight.words.shape[0] * -(-rows // (8 * config.row_tiles))
    return (0, 0) if config.split == 1 else (tiles * config.split * config.row_tiles * (512 + 32), tiles)


def grid(weight: PackedWeight, config: Config, rows: int, tail: PackedWeight | None, resident: int) -> tuple[int, int]:
    """Blocks that stay on `resident` places, for as many tiles each as there are; the tail's come on top."""
    y = -(-rows // (8 * config.row_tiles))
    more = 0 if tail is None else -(-tail.words.shape[0] // config.tiles)
    places = max(1, (resident // y - more) // config.split)
    return min(weight.words.shape[0], places) * config.split + more, y
