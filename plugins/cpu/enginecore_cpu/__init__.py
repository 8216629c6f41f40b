"""The CPU plugin of enginecore."""

__version__ = "0.1.0"
