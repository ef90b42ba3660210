"""The GPUs of this machine."""

from capplan.device.local import local_devices
from capplan.device.record import LocalDevice

__all__ = ["LocalDevice", "local_devices"]
