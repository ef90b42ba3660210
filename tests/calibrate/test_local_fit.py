"""The fit on a device whose law is known, and its small parts worked by hand."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import synthetic

from capplan import catalog
from capplan.calibrate import local_fit
from capplan.calibrate.loop import loop_shape
from capplan.calibrate.points import Point
from capplan.errors import InputError
from capplan.formulas import measured_cost
from capplan.local_calibration import checked, device, fit_hash


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([1, 2, 3], [1, 2, 3], id="rising already"),
        pytest.param([1, 3, 2, 4], [1, 2.5, 2.5, 4], id="two pooled"),
        pytest.param([3, 2, 1], [2, 2, 2], id="falling: one level"),
    ],
)
def test_rising(values: list[float], expected: list[float]) -> None:
    assert local_fit.rising(values) == expected


def test_nonnegative_leaves_out_what_would_be_negative() -> None:
    rows = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert local_fit.nonnegative(rows, np.array([3.0, 5.0, 7.0])) == pytest.approx([1, 2])
    found = local_fit.nonnegative(rows, np.array([3.0, 2.0, 1.0]))
    assert (found >= 0).all()
    assert found == pytest.approx([2, 0])  # without the falling part: the mean


def test_law_of_a_device_is_found_again() -> None:
    data = synthetic.data()
    for error in data["error"]["step"].values():
        assert error["median_pct"] < 1.5
        assert error["rows"] == len(synthetic.HELD_OUT)
    for dtype in synthetic.KERNELS.values():
        assert data["fit"]["anchors"][dtype]["gemm"] == pytest.approx(1.1, abs=0.03)


def test_exact_shapes_come_back_and_others_lie_on_the_affine_form() -> None:
    fit = synthetic.data()["fit"]["gemm"]["bf16"]["local"]
    expected = synthetic.product_us(16, 4, 3072, 2048)
    assert measured_cost.gemm_s(m=4, n=3072, k=2048, fit=fit) * 1e6 == pytest.approx(expected, rel=1e-3)
    other = synthetic.product_us(16, 2, 5000, 4096)
    assert measured_cost.gemm_s(m=2, n=5000, k=4096, fit=fit) * 1e6 == pytest.approx(other, rel=0.02)


def test_more_work_is_never_faster() -> None:
    local = checked(synthetic.data(), "x")
    work = local_fit.step_work(catalog.load_model(synthetic.MODEL), _step(1, 100))
    from capplan.local_costs import anchored
    from capplan.step import StepTable

    table = StepTable(work, anchored(local, "vllm", (), work))
    times = [table.step_s(decode_sequences=b, kv_tokens=b * 500) for b in range(1, 70)]
    assert times == sorted(times)
    times = [table.step_s(decode_sequences=3, kv_tokens=3 * c) for c in range(1, 40_000, 977)]
    assert times == sorted(times)


def _step(batch: int, context: int) -> Point:
    return Point(kind="step", key=("bf16", "bf16", "bf16", batch, context, 2, "held out", 0))


def test_void_points_are_not_seen() -> None:
    shape = loop_shape(catalog.load_model(synthetic.MODEL), 2)
    gpu = device(synthetic.HARDWARE, "x")
    good = list(synthetic.points())
    wrong = [
        Point(kind=one.kind, key=(*one.key[:-1], 1), us_p50=1e9, void="canary moved 50%")
        for one in good
        if one.kind in ("gemm", "attention", "small")
    ]
    assert local_fit.fit(good + wrong, shape, gpu) == local_fit.fit(good, shape, gpu)


def test_a_machine_that_never_held_still_is_refused() -> None:
    shape = loop_shape(catalog.load_model(synthetic.MODEL), 2)
    gpu = device(synthetic.HARDWARE, "x")
    moved = [
        Point(kind=one.kind, key=one.key, us_p50=one.us_p50, void="canary moved 50%")
        for one in synthetic.points()
    ]
    with pytest.raises(InputError, match="counts: canary moved 50%"):
        local_fit.fit(moved, shape, gpu)


def test_a_step_held_out_twice_counts_once_with_its_noise() -> None:
    def step(turn: int, us: float, void: str | None = None) -> Point:
        key = ("bf16", "bf16", "bf16", 1, 400, 2, "held out", turn)
        return Point(kind="step", key=key, us_p50=us, void=void)

    (made,) = local_fit.together([step(0, 100.0), step(1, 110.0), step(2, 900.0, "canary moved 40%")])
    assert (made.us_p50, made.noise) == (105.0, 0.1)
    (alone,) = local_fit.together([step(0, 100.0)])
    assert (alone.us_p50, alone.noise) == (100.0, None)


def test_one_anchor_draws_factors_little() -> None:
    """A single whole step cannot tell products from layers: factors stay near 1."""
    model = catalog.load_model(synthetic.MODEL)
    local = checked(synthetic.data(), "x")
    one = next(p for p in synthetic.points() if p.kind == "step" and p.use == "anchor")
    found = local_fit.anchors(local, model, [one])["bf16"]
    assert 0.9 < found["gemm"] < 1.2
    assert 0.9 < found["attention"] < 1.2


def test_lines_of_a_batch_timed_at_one_context_take_the_common_slope() -> None:
    times = {(1, 100): 15.0, (1, 200): 20.0, (2, 100): 25.0}  # 5 + 5·b + 0.05·b·c
    table = local_fit._lines(times)
    assert table["batch"] == [1, 2]
    seconds = measured_cost.decode_attention_s(batch=2, kv_tokens=200, table=table)
    assert seconds * 1e6 == pytest.approx(25.0, rel=0.02)


def test_cut_steps_carry_to_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchors of 1, 2 and 8 layers, 3 ms a step on top of the law: 16 layers are predicted within 2 %."""
    model = catalog.load_model(synthetic.MODEL)
    shape = loop_shape(model)

    def step(layers: int, batch: int, context: int, use: str) -> Point:
        monkeypatch.setattr(synthetic, "LAYERS", layers)
        us = synthetic.step_us(shape, "int4", batch, context) + 3000
        key = ("int4", "w4a16", "bf16", batch, context, layers, use, 0)
        return Point(kind="step", key=key, us_p50=us)

    local = checked(synthetic.data(), "x")
    steps = [step(layers, b, c, "anchor") for layers in (1, 2, 8) for b, c in ((1, 128), (4, 768))]
    found = local_fit.anchors(local, model, steps)["w4a16"]
    assert found["step_us"] > 1500
    data = dict(local.data)
    data["fit"] = {**local.fit, "anchors": {**local.fit["anchors"], "w4a16": found}}
    data["hash"] = fit_hash(data["fit"])
    for batch, context in ((1, 400), (3, 700)):
        whole = step(16, batch, context, "held out")
        predicted = local_fit.predicted_s(checked(data, "x"), model, whole)
        assert predicted == pytest.approx(whole.seconds, rel=0.02)
    # Of one depth alone the step's part cannot be told: it is left to the layers.
    assert local_fit.anchors(local, model, steps[2:4])["w4a16"]["step_us"] == 0
