"""The GPUs of this machine."""

from capplan.device.local import LocalDevice, local_devices

__all__ = ["LocalDevice", "local_devices"]
