"""The uninterrupted run, once for all tests here."""

import pytest

from tests.e2e.worker import make_reference


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """Step -> (digest, loss)."""
    return make_reference(tmp_path_factory.mktemp("reference"))
