"""What a trace file is, from its content; rows of every form; dates; broken rows and files."""

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.trace_forms import form_of
from capplan.sim.trace_rows import dates
from capplan.sim.traces import TraceWorkload

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:59.6805900,374,44
2023-11-16 18:16:01.0000001,396,109"""
BURST_OLD = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
BURST_NEW = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,7,1.2,ChatGPT,472,18,490,Conversation log
45.25,8,0.4,GPT-4,1087,230,1317,API log
"""
MOONCAKE = """{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 4500, "input_length": 512, "output_length": 7, "hash_ids": [1]}
"""
VLLM_RUN = """{"input_toks": 20, "output_toks": 5, "arrival_time": 1777142984.5, "queued_ts": 9.0}
{"input_toks": 30, "output_toks": 6, "arrival_time": 1777142986.0, "queued_ts": 9.5}
"""
ORACLE = """id,arrival_us,prompt_tokens,output_tokens,first_sched_us
0,12024,962,184,12024
1,108298,185,79,111705
"""
DATES = """time,isl,osl
2024-05-10T23:59:59Z,1,2
2024-05-11T01:00:00.5+01:00,3,4
"""


def written(folder: Path, text: str, name: str = "file.txt") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def read(path: Path, **options: Any) -> list[tuple[float, int, int]]:
    return [
        (round(request.arrival_s, 7), request.prompt_tokens, request.output_tokens)
        for request in TraceWorkload(path, **options).arrivals()
    ]


@pytest.mark.parametrize(
    ("text", "form", "rows"),
    [
        (AZURE, "Azure LLM", [(0, 374, 44), (1.3194101, 396, 109)]),
        (AZURE + "\n", "Azure LLM", [(0, 374, 44), (1.3194101, 396, 109)]),
        (AZURE.replace("\n", "\r\n"), "Azure LLM", [(0, 374, 44), (1.3194101, 396, 109)]),
        ("\ufeff" + AZURE, "Azure LLM", [(0, 374, 44), (1.3194101, 396, 109)]),
        (BURST_OLD, "BurstGPT", [(0, 472, 18), (40, 1087, 230)]),
        (BURST_NEW, "BurstGPT", [(0, 472, 18), (39.75, 1087, 230)]),
        (MOONCAKE, "Mooncake", [(0, 600, 5), (1.5, 512, 7)]),
        (MOONCAKE.replace("\n", "\n\n"), "Mooncake", [(0, 600, 5), (1.5, 512, 7)]),
        (VLLM_RUN, "vllm runs", [(0, 20, 5), (1.5, 30, 6)]),
        (ORACLE, "plain", [(0.012024, 962, 184), (0.108298, 185, 79)]),
        ("arrival_s,prompt_tokens,output_tokens\n2.5,10,5\n3,11,6\n", "plain", [(2.5, 10, 5), (3, 11, 6)]),
        ("arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,10,5\n", "plain", [(2.5, 10, 5)]),
        ("Arrival MS;ISL;OSL\n2500; 10; 5\n", "plain", [(2.5, 10, 5)]),
        ("timestamp\tinput-len\toutput-len\n1000.5\t10\t5\n1001\t4\t5\n", "plain", [(0, 10, 5), (0.5, 4, 5)]),
        (DATES, "plain", [(0, 1, 2), (1.5, 3, 4)]),
        ("\n\narrival_s,isl,osl\n\n1,374.0,44.0\n\n", "plain", [(1, 374, 44)]),
        ('{"arrival_s": 1.5, "isl": 10, "osl": 5}', "plain", [(1.5, 10, 5)]),
        ("arrival_ms,isl,osl\n1700000000000,1,2\n1700000000500,3,4\n", "plain", [(0, 1, 2), (0.5, 3, 4)]),
    ],
    ids=[
        "azure, no newline at the end",
        "azure",
        "azure, windows line ends",
        "azure, byte order mark",
        "burstgpt",
        "burstgpt with sessions",
        "mooncake",
        "mooncake, blank lines",
        "vllm run",
        "oracle in µs",
        "plain",
        "vidur",
        "semicolons and ms",
        "tabs",
        "dates with zones, over midnight",
        "blank lines and decimals",
        "plain JSONL",
        "ms of the epoch",
    ],
)
def test_forms(tmp_path: Path, text: str, form: str, rows: list[tuple[float, int, int]]) -> None:
    path = written(tmp_path, text)
    assert form_of(path).name == form
    assert read(path) == rows


def test_the_name_of_a_file_says_nothing(tmp_path: Path) -> None:
    assert form_of(written(tmp_path, MOONCAKE, "azure.csv")).name == "Mooncake"
    assert form_of(written(tmp_path, AZURE, "mooncake.jsonl")).name == "Azure LLM"


def test_blocks_become_segments(tmp_path: Path) -> None:
    first, second = TraceWorkload(written(tmp_path, MOONCAKE)).arrivals()
    assert first.segments == ((1, 512), (2, 88))
    assert second.segments == ((1, 512),)


def test_mooncake_without_ids_shares_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, '{"timestamp": 3000, "input_length": 600, "output_length": 5}\n')
    workload = TraceWorkload(path)
    assert not workload.shares
    assert [request.segments for request in workload.arrivals()] == [()]


def test_seven_digits_of_a_second_are_kept() -> None:
    time_of = dates()
    start = time_of("2023-11-16 18:15:46.6805900")
    assert time_of("2023-11-16 18:15:46.6805901") - start == pytest.approx(1e-7, rel=1e-3)
    assert time_of("2023-11-16 18:16:46.6805900") - start == 60
    assert time_of("2023-11-17 18:15:46.6805900") - start == 86_400
    # The Azure 2024 files have a zone.
    assert dates()("2024-05-10 00:00:00.009930+00:00") == pytest.approx(0.00993)
    assert dates()("2024-05-10") == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "yesterday",
        "2023-11-16 18:15:61.0",
        "2023-11-16 18:15:-1",
        "2023-13-01 00:00:00",
        "2023-11-16 18:15:nan",
    ],
)
def test_no_dates(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        dates()(text)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no trace known here: no arrival column in 'nothing'"),
        ("1,2,3\n4,5,6\n", "no trace known here: no arrival column in '1, 2, 3'"),
        ("arrival_s,isl\n1,2\n", "no trace known here: no output column in 'arrival_s, isl'"),
        ("arrival_s,isl,prompt_tokens,osl\n", "more than one prompt column: prompt_tokens, isl"),
        ("{not json}\n", "no JSON lines"),
        ("{}\n", "no trace known here: no arrival column in 'nothing'"),
        ("[1, 2]\n", "no trace known here: no arrival column in '[1, 2]'"),
        ("arrival_s,isl,osl\n", "a trace without requests"),
        ("timestamp,isl,osl\n", "a trace without requests"),
        ("x" * 3_000_000, "the trace has no lines"),
        ('arrival_s,isl,osl\n1,2,"' + "3" * 200_000, "the trace is no CSV: field larger than field limit"),
    ],
    ids=["empty", "no header", "column missing", "column twice", "no json", "empty json", "json list",
         "header only", "header with a timestamp only", "no line ends", "a field without end"],
)  # fmt: skip
def test_no_traces(tmp_path: Path, text: str, what: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.message.startswith(what)
    assert caught.value.where.startswith(str(path))
    assert len(str(caught.value).splitlines()) == 3


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file or directory"):
        form_of(tmp_path / "nowhere.csv")
    with pytest.raises(InputError, match="the trace is no file"):
        form_of(Path("/dev/null"))
    with pytest.raises(InputError, match="Is a directory"):
        form_of(tmp_path)
    packed = tmp_path / "trace.csv.gz"
    packed.write_bytes(gzip.compress(AZURE.encode()))
    with pytest.raises(InputError, match="is no text in UTF-8"):
        form_of(packed)
    latin = tmp_path / "late.csv"
    latin.write_bytes(b"arrival_s,isl,osl\n" + b"1,2,3\n" * 10_000 + b"\xff,2,3\n")
    with pytest.raises(InputError, match="is no text in UTF-8"):
        read(latin)


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ("x,10,5", "a row that cannot be read: arrival_s 'x', isl '10', osl '5'"),
        ("3,ten,5", "a row that cannot be read: arrival_s '3', isl 'ten', osl '5'"),
        ("3,10.5,5", "a row that cannot be read: arrival_s '3', isl '10.5', osl '5'"),
        ("3,10,inf", "a row that cannot be read: arrival_s '3', isl '10', osl 'inf'"),
        ("3,10", "a row without osl"),
        ("3,,", "a row without isl, osl"),
        ("3,0,5", "isl is 0"),
        ("3,-7,5", "isl is -7"),
        ("3,10,0", "osl is 0"),
        ("3,10,99999999999", "osl is 99999999999"),
        ("nan,10,5", "arrival_s is nan s, no time from 0 up"),
        ("inf,10,5", "arrival_s is inf s, no time from 0 up"),
        ("1.5,10,5", "arrival_s is 0.5 s before the row above"),
    ],
)
def test_a_bad_row_is_named_with_its_line_or_left_out_and_counted(
    tmp_path: Path, row: str, what: str
) -> None:
    path = written(tmp_path, f"arrival_s,isl,osl\n1,10,5\n\n2,11,5\n{row}\n4,12,5\n")
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.message == what
    assert caught.value.where == f"{path}, line 5"
    assert "--skip-bad-rows" in caught.value.hint
    workload = TraceWorkload(path, skip_bad_rows=True)
    assert [request.prompt_tokens for request in workload.arrivals()] == [10, 11, 12]
    assert workload.skipped == 1
    assert workload.first_skipped == f"line 5: {what}"


GOOD = [AZURE, BURST_NEW, MOONCAKE, VLLM_RUN, ORACLE, DATES]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.sampled_from(GOOD),
    at=st.integers(0, 400),
    cut=st.integers(0, 40),
    put=st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            ["\x00", '"', "\n", ",", "-1", "1e999", "nan", "[", "{}", "null", "9" * 30, "\ud7ff"]
        ),
    ),
    sort_rows=st.sampled_from([0, 2]),
)
def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, text: str, at: int, cut: int, put: str, sort_rows: int
) -> None:
    damaged = text[:at] + put + text[at + cut :]
    path = written(tmp_path, damaged)
    for skip_bad_rows in (False, True):
        try:
            workload = TraceWorkload(path, sort_rows=sort_rows, skip_bad_rows=skip_bad_rows)
            found = list(workload.arrivals())
        except InputError as error:
            assert len(str(error).splitlines()) == 3
            continue
        assert all(0 <= r.arrival_s < 1e12 and r.prompt_tokens > 0 and r.output_tokens > 0 for r in found)
        assert all(earlier.arrival_s <= later.arrival_s for earlier, later in pairwise(found))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "'{' is no JSON"),
        ("7", "a row without timestamp, input_length, output_length"),
        ("[" * 100_000, "'[[["),
        (
            {"input_length": True},
            "a row that cannot be read: timestamp 2, input_length True, output_length 5",
        ),
        ({"input_length": 12.5}, "a row that cannot be read: timestamp 2, input_length 12.5"),
        ({"output_length": None}, "a row without output_length"),
        ({"timestamp": {}}, "a row that cannot be read: timestamp {}"),
        ({"output_length": 10**400}, "output_length is 1000"),
        ({"hash_ids": [1, 2]}, "hash_ids holds 2 ids, not 1 numbers"),
        ({"hash_ids": []}, "hash_ids holds 0 ids, not 1 numbers"),
        ({"hash_ids": [[1]]}, "hash_ids holds 1 ids, not 1 numbers"),
        ({"hash_ids": None}, "hash_ids holds None, not 1 numbers"),
        ({"input_length": 0, "hash_ids": []}, "input_length is 0"),
    ],
)
def test_a_bad_json_line(tmp_path: Path, line: str | dict[str, Any], what: str) -> None:
    good = {"timestamp": 1, "input_length": 100, "output_length": 5, "hash_ids": [1]}
    bad = line if isinstance(line, str) else json.dumps({**good, "timestamp": 2, **line})
    path = written(tmp_path, f"{json.dumps(good)}\n{bad}\n{json.dumps({**good, 'timestamp': 3})}\n")
    with pytest.raises(InputError) as caught:
        read(path)
    assert caught.value.message.startswith(what)
    assert caught.value.where == f"{path}, line 2"
    assert len(caught.value.message) < 300
    workload = TraceWorkload(path, skip_bad_rows=True)
    assert len(list(workload.arrivals())) == 2
    assert workload.skipped == 1
