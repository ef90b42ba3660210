"""Errors keep their three lines on the way out of a worker process."""

import pickle

import pytest

from capplan.errors import CapplanError


@pytest.mark.parametrize(
    "kind", [CapplanError, *CapplanError.__subclasses__()], ids=lambda kind: kind.__name__
)
def test_an_error_survives_pickling(kind: type[CapplanError]) -> None:
    made = kind("what: 80 GiB", where="--gpu", hint="another one")
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is kind
    assert str(again) == str(made) == "error: what: 80 GiB\n  --> --gpu\n  = help: another one"
    assert (again.where, again.hint, again.exit_status) == (made.where, made.hint, made.exit_status)
