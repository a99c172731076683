"""What all tests share."""

import torch

# One thread to a test process: the tests run side by side, and more threads than cores thrash.
torch.set_num_threads(1)
