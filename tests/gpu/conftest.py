"""Every test here that takes a ``place`` runs on the CPU, and where there is one, on a GPU."""

import pytest
import torch

from tests.gpu.places import Cuda, Late


@pytest.fixture(params=["late", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request, monkeypatch):
    """A device in name only, or a real one."""
    return {"late": Late, "cuda": Cuda}[request.param](monkeypatch)


@pytest.fixture
def cuda(monkeypatch):
    """The first CUDA device."""
    return Cuda(monkeypatch)


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Run the package's tests on one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
