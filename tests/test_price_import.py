"""Price tables of other tools: gpuhunt's and SkyPilot's catalogs, a plain CSV, and bad ones."""

import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capplan import price_cache, price_import
from capplan.errors import InputError
from capplan.price_import import gpu_named, read_prices

DAY = datetime.date(2026, 11, 1)
GPUHUNT = """\
instance_name,location,price,cpu,memory,gpu_count,gpu_name,gpu_memory,spot,disk_size,gpu_vendor,flags
p5.48xlarge,us-east-1,55.04,192,2048.0,8,H100,80.0,False,,nvidia,
p5.48xlarge,us-east-1,20.0,192,2048.0,8,H100,80.0,True,,nvidia,
p4d.24xlarge,us-east-1,21.957642,96,1152.0,8,A100,40.0,False,,nvidia,
p4de.24xlarge,us-east-1,27.44705,96,1152.0,8,A100,80.0,False,,nvidia,
m5.large,us-east-1,0.096,2,8.0,0,,,False,,,
p2.xlarge,us-east-1,0.9,4,61.0,1,K80,12.0,False,,nvidia,
free.tier,us-east-1,0,4,61.0,1,T4,16.0,False,,nvidia,
broken,us-east-1,cheap,4,61.0,1,T4,16.0,False,,nvidia,
"""
SKYPILOT = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice,AvailabilityZone
cpu_4x_general,,,4.0,16.0,0.2,us-east-1,,,
gpu_8x_a100_80gb_sxm4,A100-80GB,8.0,240.0,1800.0,14.32,us-east-1,"{'Gpus': [{'Count': 8.0}]}",,
gpu_1x_h100_pcie,H100,1.0,26.0,200.0,2.49,us-east-1,,1.10,use1-az1
gpu_1x_h100_pcie,H100,1.0,26.0,200.0,2.49,us-east-1,,1.05,use1-az2
nv6,A10,0.167,6.0,55.0,0.454,eastus,,,
gpu_1x_k80,K80,1.0,4.0,60.0,0.5,us-east-1,,,
"""
PLAIN = """\
cloud,gpu,count,instance,region,term,usd_per_hour,read_on,source
Our DC,h100-sxm,8,rack,fra-1,1yr,16,2026-10-01,contract 17
Our DC,l40s,1,,fra-1,on-demand,0.8,,
"""


def table(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_gpuhunt_catalog(tmp_path: Path) -> None:
    made = read_prices(table(tmp_path, "aws.csv", GPUHUNT), read_on=DAY)
    found = {(row.gpu_id, row.term): row for row in made.rows}
    assert set(found) == {
        ("h100-sxm-80gb", "on-demand"),
        ("h100-sxm-80gb", "spot"),
        ("a100-sxm-40gb", "on-demand"),
        ("a100-sxm-80gb", "on-demand"),
    }
    h100 = found["h100-sxm-80gb", "on-demand"]
    assert (h100.cloud, h100.gpu_count, h100.usd_per_hour, h100.usd_per_gpu_hour) == ("aws", 8, 55.04, 6.88)
    assert h100.read_on == "2026-11-01"
    assert made.skipped == {"without a GPU": 1, "no usable price": 1, "malformed": 1}
    assert made.first_malformed == 9
    assert made.unknown_gpus == {"K80": 1}


def test_skypilot_catalog(tmp_path: Path) -> None:
    made = read_prices(table(tmp_path, "lambda/vms.csv", SKYPILOT), read_on=DAY)
    assert made.skipped == {"without a GPU": 1, "a part of a GPU": 1}
    rows = made.by_cloud()["lambda"]
    found = {(row.gpu_id, row.term): row.usd_per_hour for row in rows}
    # One spot price a region: the cheapest of its zones.
    assert found == {
        ("a100-sxm-80gb", "on-demand"): 14.32,
        ("h100-sxm-80gb", "on-demand"): 2.49,
        ("h100-sxm-80gb", "spot"): 1.05,
    }


def test_plain_table(tmp_path: Path) -> None:
    made = read_prices(table(tmp_path, "own.csv", PLAIN), read_on=DAY)
    contract, spare = made.rows
    assert (contract.gpu_id, contract.term, contract.usd_per_gpu_hour) == ("h100-sxm-80gb", "1yr", 2.0)
    assert (contract.read_on, contract.source) == ("2026-10-01", "contract 17")
    assert (spare.gpu_count, spare.usd_per_gpu_hour, spare.read_on) == (1, 0.8, "2026-11-01")


def test_plain_price_of_one_gpu(tmp_path: Path) -> None:
    text = "gpu,count,usd_per_gpu_hour\nt4,4,0.5\n"
    made = read_prices(table(tmp_path, "own.csv", text), read_on=DAY, cloud="us")
    assert made.rows[0].usd_per_hour == 2.0


def test_imported_prices_are_used(tmp_path: Path) -> None:
    made = read_prices(table(tmp_path, "aws.csv", GPUHUNT), read_on=DAY, cloud="Amazon")
    files = price_import.store(tmp_path / "cache", made, price_cache.load())
    assert [path.name for path in files] == ["aws.import.json"]
    book = price_cache.load(tmp_path / "cache")
    spot = [
        row for row in book.of_gpu("h100-sxm-80gb") if row.term == "spot" and row.instance == "p5.48xlarge"
    ]
    assert [row.usd_per_hour for row in spot if row.read_on == "2026-11-01"] == [20.0]


def test_summary_counts_what_was_left_out(tmp_path: Path) -> None:
    made = read_prices(table(tmp_path, "aws.csv", GPUHUNT), read_on=DAY)
    lines = {line["what"]: line["rows"] for line in price_import.summary(made, price_cache.load())}
    assert lines["gpuhunt: prices of aws"] == 4
    assert lines["left out, GPU not known: K80"] == 1
    assert lines["left out, malformed, first in line 9"] == 1
    assert sum(lines.values()) == len(GPUHUNT.splitlines()) - 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "columns not understood"),
        ("a,b\n1,2\n", "columns not understood"),
        ("gpu,usd_per_gpu_hour,cloud\nh1000,2,x\n", "unknown gpu"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,free,x\n", "price 'free'"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,0,x\n", "price '0'"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,nan,x\n", "price 'nan'"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,inf,x\n", "price 'inf'"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,2490,x\n", "price '2490'"),
        ("gpu,usd_per_gpu_hour,cloud\nh100,,x\n", "not one price"),
        ("gpu,usd_per_gpu_hour,usd_per_hour,cloud\nh100,1,2,x\n", "not one price"),
        ("gpu,usd_per_gpu_hour\nh100,2\n", "no cloud"),
        ("gpu,usd_per_gpu_hour,cloud,count\nh100,2,x,1.5\n", "count"),
        ("gpu,usd_per_gpu_hour,cloud,term\nh100,2,x,weekly\n", "unknown term"),
        ("gpu,usd_per_gpu_hour,cloud,read_on\nh100,2,x,12/01/26\n", "read_on"),
        ("gpu,usd_per_gpu_hour,cloud,colour\nh100,2,x,red\n", "unknown column"),
        ("gpu,usd_per_gpu_hour,cloud\n", "no usable price"),
        (GPUHUNT.splitlines()[0] + "\nx,us,1,1,1,1,K80,12,False,,nvidia,\n", "GPUs not known: K80"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        read_prices(table(tmp_path, "x.csv", text), read_on=DAY)


def test_a_table_without_a_day_needs_one(tmp_path: Path) -> None:
    for text in (GPUHUNT, SKYPILOT, "gpu,usd_per_gpu_hour,cloud\nh100,2,x\n"):
        with pytest.raises(InputError, match="of which day") as caught:
            read_prices(table(tmp_path, "x.csv", text))
        assert "--read-on" in caught.value.hint


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00gpu,price\x00")
    with pytest.raises(InputError, match="no CSV"):
        read_prices(tmp_path / "bytes.csv", read_on=DAY)
    with pytest.raises(InputError, match="no such file"):
        read_prices(tmp_path / "none.csv", read_on=DAY)
    with pytest.raises(InputError, match="cannot be read"):
        read_prices(tmp_path, read_on=DAY)


HEADS = [GPUHUNT.splitlines()[0], SKYPILOT.splitlines()[0], PLAIN.splitlines()[0], "gpu,usd_per_hour"]
CELLS = st.sampled_from(
    [
        "",
        "1",
        "8",
        "-1",
        "0",
        "nan",
        "inf",
        "1e400",
        "9" * 400,
        "H100",
        "h100",
        "T4",
        "True",
        "x",
        '"',
        "2026-01-02",
    ]
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(head=st.sampled_from(HEADS), rows=st.lists(st.lists(CELLS, max_size=16), max_size=5))
def test_any_table_gives_sound_prices_or_one_error(tmp_path: Path, head: str, rows: list[list[str]]) -> None:
    path = table(tmp_path, "x.csv", "\n".join([head, *(",".join(row) for row in rows)]))
    try:
        made = read_prices(path, read_on=DAY, cloud="x")
    except InputError as error:
        assert error.hint
    else:
        assert all(0 < row.usd_per_gpu_hour <= 1000 and row.gpu_count >= 1 for row in made.rows)


@pytest.mark.parametrize(
    ("name", "memory", "gpu_id"),
    [
        ("A100", 40, "a100-sxm-40gb"),
        ("A100", 80, "a100-sxm-80gb"),
        ("A100-80GB", None, "a100-sxm-80gb"),
        ("H100", 80, "h100-sxm-80gb"),
        ("H100NVL", 94, "h100-nvl-94gb"),
        ("V100", 16, "v100-sxm-16gb"),
        ("V100", 32, "v100-sxm-32gb"),
        ("L40S", 48, "l40s-48gb"),
        ("A10G", 24, "a10g-24gb"),
        ("RTX4090", 24, "rtx-4090-24gb"),
        ("MI300X", 192, "mi300x-192gb"),
        ("v5litepod", 16, "tpu-v5e-16gb"),
        ("H100", 24, None),
        ("K80", 12, None),
    ],
)
def test_names_of_other_catalogs(name: str, memory: float | None, gpu_id: str | None) -> None:
    assert gpu_named(name, memory) == gpu_id
