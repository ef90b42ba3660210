"""Stored bytes from config.json alone: one rank of vLLM, published checkpoints, GGUF, formats."""

import pytest

from capplan import catalog
from capplan.weights import weight_budget
from tests.accuracy import oracles
from tests.accuracy.stored_weights import (
    EXCEPTIONS,
    PUBLISHED_GPT_OSS_120B_BYTES,
    BytesRow,
    checkpoint_rows,
    format_rows,
    ggml_type_rows,
    gguf_rows,
    random_702m,
    rank_rows,
    rejected_splits,
)

pytestmark = pytest.mark.usefixtures("data")

RANK_ERROR = 0.004
CHECKPOINT_ERROR = 0.01
# "Loading model weights took", which in those versions was the peak while loading.
MEASURED_ERROR = 0.02
# Neither may fall: rows of weights_by_tp.csv and checkpoints.csv that are equal to the byte.
RANKS_EXACT = 164
CHECKPOINTS_EXACT = 13
CHECKPOINTS_COMPARED = 85


@pytest.fixture(scope="module")
def ranks() -> list[BytesRow]:
    return rank_rows()


@pytest.fixture(scope="module")
def checkpoints() -> list[BytesRow]:
    return checkpoint_rows()


def test_bytes_of_one_rank(ranks: list[BytesRow]) -> None:
    assert len(ranks) == len(oracles.rows("weights_by_tp")) >= 204
    assert {row.name: row.error for row in ranks if abs(row.error) > RANK_ERROR} == {}
    assert sum(row.got == row.want for row in ranks) >= RANKS_EXACT


def test_every_rejected_split_is_refused() -> None:
    splits = rejected_splits()
    assert len(splits) == len(oracles.rows("tp_rejected")) >= 14
    assert [split for split in splits if not split[2]] == []


def test_stored_bytes_of_checkpoints(checkpoints: list[BytesRow]) -> None:
    compared = [row for row in checkpoints if row.got is not None]
    assert len(checkpoints) == len(oracles.rows("checkpoints")) >= 85
    assert len(compared) >= CHECKPOINTS_COMPARED
    outside = {
        row.name: row.error
        for row in compared
        if not row.exception and abs(row.error) > (MEASURED_ERROR if row.measured else CHECKPOINT_ERROR)
    }
    assert outside == {}
    assert sum(row.got == row.want for row in compared) >= CHECKPOINTS_EXACT


def test_gpt_oss_120b_as_published() -> None:
    # vLLM's row is the padded size after loading (70,756,592,256 B); the files hold this.
    model = oracles.model_at(oracles.ORACLES / "configs" / "openai--gpt-oss-120b@MXFP4.json")
    assert weight_budget(model, None).bytes == PUBLISHED_GPT_OSS_120B_BYTES


def test_what_llama_cpp_wrote() -> None:
    assert random_702m().parameters == 702_359_040
    rows = gguf_rows()
    assert len(rows) == len(oracles.rows("gguf_quantize_random_702M")) >= 10
    # GGUF keeps norms at 32 bits, also in files of a plain 16-bit type: 49 × 1536 × 2 B.
    norms = {"F16": 150_528, "BF16": 150_528}
    assert {row.name: row.want - (row.got or 0) for row in rows if row.got != row.want} == norms


def test_rows_about_something_else_are_still_so(checkpoints: list[BytesRow]) -> None:
    excepted = {row.name: row.error for row in checkpoints if row.exception}
    assert len(excepted) == len(EXCEPTIONS)
    assert all(abs(error) > CHECKPOINT_ERROR for error in excepted.values())


def test_effective_bits() -> None:
    formats, types = format_rows(), ggml_type_rows()
    assert {row.format: row for row in (*formats, *types) if not row.equal} == {}
    # Every row of the oracle has a format or a type.
    named = {row.oracle for row in (*formats, *types)}
    assert named == {row["format"] for row in oracles.rows("quant_bits")}


def test_effective_bits_follow_from_the_parts() -> None:
    for identity in catalog.ids("formats"):
        form = catalog.load_format(identity)
        if form.group_shape == "gguf":
            bits = form.block_bytes * 8 / form.group
        elif form.group_shape in ("input", "block"):
            size = form.group if form.group_shape == "input" else form.block_rows * form.block_cols
            bits = form.element_bits + (form.scale_bits + form.zero_bits) / size
        else:
            bits = form.element_bits
        assert form.effective_bits == pytest.approx(bits, rel=1e-9), identity
