"""A fraction carried across the version that put CUDA graphs inside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capplan.engines.vllm_graphs import (
    fraction_with_graphs,
    fraction_without_graphs,
    graphs_fraction,
    visible_from_fractions,
)
from capplan.errors import InputError
from capplan.units import GIB

SIZES = {"graph_bytes": 2 * GIB, "visible_bytes": 80 * GIB}


def test_by_the_share_of_the_graphs() -> None:
    # 2 / 80
    assert graphs_fraction(**SIZES) == 0.025
    assert fraction_with_graphs(0.9, **SIZES) == pytest.approx(0.925)
    assert fraction_without_graphs(0.9, **SIZES) == pytest.approx(0.875)


def test_a_fraction_that_does_not_exist_is_none() -> None:
    assert fraction_with_graphs(0.98, **SIZES) is None
    assert fraction_without_graphs(0.02, **SIZES) is None


@given(fraction=st.floats(0.1, 0.9), graphs=st.integers(1, 4 * GIB), visible=st.integers(48 * GIB, 200 * GIB))
def test_there_and_back(fraction: float, graphs: int, visible: int) -> None:
    there = fraction_with_graphs(fraction, graph_bytes=graphs, visible_bytes=visible)
    assert there is not None
    assert there > fraction
    back = fraction_without_graphs(there, graph_bytes=graphs, visible_bytes=visible)
    assert back == pytest.approx(fraction)


def test_the_memory_behind_two_printed_fractions() -> None:
    # 0.5 / 0.01
    assert visible_from_fractions(fraction=0.9, without_graphs=0.89, graph_bytes=GIB // 2) == pytest.approx(
        50 * GIB, rel=1e-9
    )


@pytest.mark.parametrize(
    ("fraction", "without", "graphs"),
    [(0.9, 0.9, GIB), (0.8, 0.9, GIB), (1.2, 0.9, GIB), (0.9, 0.0, GIB), (0.9, 0.8, 0)],
)
def test_fractions_that_cannot_be_two(fraction: float, without: float, graphs: int) -> None:
    with pytest.raises(InputError, match="fractions"):
        visible_from_fractions(fraction=fraction, without_graphs=without, graph_bytes=graphs)


@pytest.mark.parametrize(("graphs", "visible"), [(-1, GIB), (GIB, GIB), (0, 0)])
def test_graphs_larger_than_the_gpu(graphs: int, visible: int) -> None:
    with pytest.raises(InputError, match="CUDA graphs"):
        graphs_fraction(graph_bytes=graphs, visible_bytes=visible)
