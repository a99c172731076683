"""What all tests share."""

import pytest
import torch

from tests.ops.decode.on_device import INTERPRETED

# One thread to a test process: the tests run side by side, and more threads than cores thrash.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    able = {"gpu": torch.cuda.is_available(), "triton": torch.cuda.is_available() or INTERPRETED}
    lacks = {"gpu": "needs an NVIDIA GPU", "triton": "needs a GPU or Triton's interpreter"}
    for item in items:
        for mark, there in able.items():
            if item.get_closest_marker(mark) and not there:
                item.add_marker(pytest.mark.skip(reason=lacks[mark]))
