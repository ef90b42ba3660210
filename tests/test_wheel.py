"""Wheel, sdist and editable install carry the same package: kernels and catalogs inside."""

import hashlib
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(wheel, sdist) built from a copy of what git tracks or would track; the wheel from the sdist."""
    pytest.importorskip("build", reason="the build front end is a development dependency")
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def source_files() -> dict[str, str]:
    """Package-relative path → digest, as an editable install sees the package."""
    made: dict[str, str] = {}
    for folder, prefix in (("capplan", ""), ("kernels", "kernels/"), ("profiles", "profiles/")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                relative = path.relative_to(ROOT / folder)
                if folder == "capplan" and relative.parts[0] in ("kernels", "profiles"):
                    continue
                made[prefix + relative.as_posix()] = digest(path.read_bytes())
    return made


def test_wheel_is_the_source_tree(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        inside = {
            name.removeprefix("capplan/"): digest(wheel.read(name))
            for name in wheel.namelist()
            if name.startswith("capplan/")
        }
    assert inside == source_files()


def test_wheel_has_kernels_and_catalogs(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert "capplan/kernels/paged_attention.py" in names
    assert "capplan/profiles/index.json" in names
    assert "capplan/profiles/gpus/h100-sxm-80gb.yaml" in names
    assert sum(name.startswith("capplan/profiles/gpus/") for name in names) >= 82
    assert sum(name.startswith("capplan/profiles/models/") for name in names) >= 40
    assert not any(name.startswith(("kernels/", "profiles/", "tests/")) for name in names)


def test_sdist_has_the_same_files(built: tuple[Path, Path]) -> None:
    made: dict[str, str] = {}
    with tarfile.open(built[1]) as sdist:
        for member in sdist.getmembers():
            path = member.name.partition("/")[2]
            if not member.isfile():
                continue
            stream = sdist.extractfile(member)
            assert stream is not None
            for folder, prefix in (("capplan/", ""), ("kernels/", "kernels/"), ("profiles/", "profiles/")):
                if path.startswith(folder):
                    made[prefix + path.removeprefix(folder)] = digest(stream.read())
                    break
    assert made == source_files()


def test_editable_install_reads_the_linked_folders() -> None:
    for name in ("kernels", "profiles"):
        link = ROOT / "capplan" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
    assert not (ROOT / "kernels" / "__init__.py").exists()
