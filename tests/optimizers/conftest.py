"""One thread for small tensors: on a busy machine OpenMP's barriers cost more than the work."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Run the package's tests on one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
