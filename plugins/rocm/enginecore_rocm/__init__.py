"""AMD GPUs for enginecore."""
