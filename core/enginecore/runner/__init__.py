"""Plan -> tensors -> tokens: the persistent batch, the model's step and the sampler."""

from enginecore.runner.runner import ModelRunner

__all__ = ["ModelRunner"]
