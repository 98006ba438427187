"""One thread: the models of these tests are too small to share out, and their threads would only
wait for each other, minutes long where other processes want the same cores.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
