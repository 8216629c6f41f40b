"""The version of every distribution in this repository."""

__version__ = "0.1.0"
