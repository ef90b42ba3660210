"""One side of a diff → its snapshots: files, folders, a git revision without a checkout, a baseline file."""

import os
import posixpath
import subprocess
import tempfile
from pathlib import Path

from capplan import snapshot
from capplan.baseline import Baseline
from capplan.check import SUFFIXES, scenario_files
from capplan.errors import InputError
from capplan.scenario import Disk, Files, load_scenarios
from capplan.snapshot import Snapshot

Side = dict[str, Snapshot]
"""Path below the folder given (or the file's name) and variant → snapshot."""


def side(text: str) -> Side:
    """The snapshots of a path, or of REVISION:PATH; what exists on the disk is a path."""
    if os.path.exists(text):
        return _baseline(text) if text.endswith(".json") else _disk(text)
    revision, found, path = text.partition(":")
    if not found or not revision:
        raise InputError(
            "no such file or folder", where=text, hint="a path, or REVISION:PATH as in main:scenarios/"
        )
    with tempfile.TemporaryDirectory(prefix="capplan-") as folder:
        return _revision(GitFiles(revision, folder), text, path)


def _taken(files: Files, paths: dict[str, str]) -> Side:
    """The snapshots of files by the name they are compared under."""
    return {
        name + scenario.chosen: snapshot.take(scenario)
        for name, path in paths.items()
        for scenario in load_scenarios(path, files)
    }


def _disk(text: str) -> Side:
    root = text if os.path.isdir(text) else os.path.dirname(text) or "."
    paths = scenario_files([text])
    return _taken(Disk(), {os.path.relpath(path, root).replace(os.sep, "/"): path for path in paths})


def _baseline(text: str) -> Side:
    entries = Baseline(path=text).entries()
    try:
        made = {name: snapshot.read(entry) for name, entry in entries.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            "the baseline has no snapshots", where=text, hint="write it anew: --update-baseline"
        ) from None
    # Under the folder they share, as the files of a folder are named.
    shared = posixpath.commonpath(
        [posixpath.dirname(name.partition("[")[0]) or "." for name in made] or ["."]
    )
    return {
        posixpath.relpath(name.partition("[")[0], shared) + _variant(name): entry
        for name, entry in made.items()
    }


def _variant(name: str) -> str:
    return name[name.index("[") :] if "[" in name else ""


def _revision(files: "GitFiles", text: str, path: str) -> Side:
    root = posixpath.normpath(path.rstrip("/")) if path.strip("/.") else "."
    names = files.below(root)
    if names == [root]:
        return _taken(files, {posixpath.basename(root): root})
    wanted = {}
    for name in names:
        short = posixpath.relpath(name, root)
        hidden = any(part[0] in "._" for part in short.split("/"))
        if name.endswith(SUFFIXES) and not hidden:
            wanted[short] = name
    if not wanted:
        raise InputError(
            "no scenario files", where=text, hint="`git ls-tree REVISION PATH` shows what is there"
        )
    return _taken(files, wanted)


class GitFiles:
    """Files of a commit, read with git show; nothing is checked out.

    A model or calibration that a scenario names is copied into `folder`.
    """

    def __init__(self, revision: str, folder: str) -> None:
        self.revision = revision
        self.folder = folder
        # The commit once: a branch that moves meanwhile changes nothing.
        self.commit = self._git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}")[
            0
        ].strip()

    def _git(self, *arguments: str) -> tuple[str, bytes]:
        """Standard output as text and bytes; InputError with git's own first line."""
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, check=False)
        except OSError:
            raise InputError(
                "git is not installed", where=self.revision, hint="give a folder instead"
            ) from None
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            message = said[0].removeprefix("fatal: ") if said else "git failed"
            raise InputError(message, where=self.revision, hint="a branch, tag or commit of this repository")
        return done.stdout.decode(errors="replace"), done.stdout

    def below(self, path: str) -> list[str]:
        """The files at or below a path, from the repository's root."""
        where = [] if path == "." else ["--", path]
        listed = self._git("ls-tree", "-r", "-z", "--name-only", "--full-tree", self.commit, *where)[0]
        return [name for name in listed.split("\0") if name]

    def read(self, path: str) -> bytes:
        if path not in self.below(path):
            raise InputError(f"is not in {self.revision}", where=path, hint="check the path")
        return self._git("cat-file", "blob", f"{self.commit}:{path}")[1]

    def local(self, path: str) -> str:
        if path.startswith(("/", "~", "..")):
            return path
        target = Path(self.folder)
        for name in self.below(path):
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(self._git("cat-file", "blob", f"{self.commit}:{name}")[1])
        return str(target / path)
