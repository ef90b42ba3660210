"""Where the user's own files lie, by the conventions of each system."""

import os
import sys
from pathlib import Path


def calibration_folder() -> Path:
    """Folder of calibrations measured here: in XDG_DATA_HOME, or the system's folder for a user's data."""
    home = Path.home()
    if named := os.environ.get("XDG_DATA_HOME"):
        base = Path(named)
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".local" / "share"
    return base / "capplan" / "calibrations"


def price_folder() -> Path:
    """Folder of fetched and imported prices: in XDG_CACHE_HOME, or the system's folder for caches."""
    home = Path.home()
    if named := os.environ.get("XDG_CACHE_HOME"):
        base = Path(named)
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    else:
        base = home / ".cache"
    return base / "capplan" / "prices"
