"""Data of the accuracy tests: skipped where it is absent, red in CI."""

import os
from collections.abc import Generator

import pytest

from tests.accuracy import oracles
from tests.accuracy.cases import FieldCase


@pytest.fixture(scope="session")
def data() -> None:
    """The measured data is there; every file of it."""
    missing = oracles.missing()
    if not missing:
        return
    what = ", ".join(missing) if oracles.DATA.exists() else "the folder"
    reason = f"the measured data is not at <repository>/../shared/data: no {what}"
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> FieldCase:
    """The field case of a test."""
    made: FieldCase = request.function.field_case
    made.checked.clear()
    return made


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """A test that passed must have computed every figure put on it."""
    result = yield
    made = getattr(pyfuncitem.function, "field_case", None)
    if isinstance(made, FieldCase):
        forgotten = set(made.figures) - made.checked
        assert not forgotten, f"{made.id}: never computed: {sorted(forgotten)}"
    return result
