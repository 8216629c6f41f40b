"""NVIDIA GPUs for enginecore."""
