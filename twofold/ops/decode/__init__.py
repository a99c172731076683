"""What a decode pass of few rows computes with: references, and the GPU's kernels for them.

Every function here is safe in a captured CUDA graph: shapes are static, lengths and counts stay on the device, and
nothing waits for the host. Call each once before capture, so that it is compiled.
"""
