"""Triton versions, for NVIDIA GPUs; signatures and meaning are those of the reference functions in `twofold.ops`."""
