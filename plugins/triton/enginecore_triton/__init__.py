"""Portable Triton kernels for enginecore. Importing this package loads neither Triton nor a driver."""

from enginecore_triton.device import DeviceDescription

__all__ = ["DeviceDescription"]
