"""Data of the accuracy tests: skipped where it is absent, red in CI."""

import os

import pytest

from tests.accuracy import oracles


@pytest.fixture(scope="session")
def data() -> None:
    """The measured data is there; every file of it."""
    missing = oracles.missing()
    if not missing:
        return
    reason = f"no measured data at <repository>/../shared/data: {', '.join(missing)}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
