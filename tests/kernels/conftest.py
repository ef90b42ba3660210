"""One thread for the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from a second thread, and on a busy machine two of them wait for
    each other at every product: 54 s instead of 6 s, measured on two cores with two busy jobs."""
    torch = pytest.importorskip("torch", reason="the kernels' references run on torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
