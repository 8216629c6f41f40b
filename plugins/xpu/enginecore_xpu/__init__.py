"""Intel GPUs for enginecore."""
