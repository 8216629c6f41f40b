"""How long a step takes: a roofline (Williams, Waterman and Patterson, 2009) over the parts of a decoder.

    part        operations                              bytes
    layers      2 a weight and token                    weights once a step, each token's inputs and outputs
    attention   4 a head number and (query, key) pair   each sequence's keys and values once, the new ones written
    head        2 a weight and wanted row               weights once, if any row is wanted; float32 logits

Each part takes the longer of its operations at the peak rate and its bytes at the memory's; the parts follow one
another. Launches come on top, and in a tensor-parallel group of N devices, which split every part evenly, two
all-reduces a layer as a ring does them: each device sends and receives 2 (N - 1) / N of the tokens' hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from enginecore_sim.models import ModelShape
from enginecore_sim.profiles import DeviceProfile

#: Kernels of a fused layer: norm, QKV, rotary, cache write, attention, output, norm, gate and up, activation, down.
LAYER_KERNELS = 10
#: Kernels of a step beside its layers: embedding, last norm, head, sampling.
STEP_KERNELS = 4
ALL_REDUCES = 2


@dataclass(frozen=True)
class Roofline:
    """A model on a device, or on `num_devices` that act as one. `flops` is one's peak rate in the model's dtype."""

    profile: DeviceProfile
    shape: ModelShape
    flops: float
    num_devices: int = 1
    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0

    def step_seconds(self, query_lens: np.ndarray, seq_lens: np.ndarray, num_rows: int) -> float:
        """Modelled time of a step of sequences that compute `query_lens` tokens, the last of `seq_lens` in all, and
        want the logits of `num_rows` of them."""
        queries, lengths = query_lens.astype(np.float64), seq_lens.astype(np.float64)
        num_tokens = float(queries.sum())
        return (
            self._layers(num_tokens)
            + self._attention(num_tokens, queries, lengths)
            + self._head(num_rows)
            + self._launches()
            + self._all_reduces(num_tokens)
        )

    def _longer(self, flops: float, num_bytes: float) -> float:
        compute = flops / (self.flops * self.compute_efficiency)
        memory = num_bytes / (self.profile.bytes_per_s * self.bandwidth_efficiency)
        return max(compute, memory) / self.num_devices

    def _layers(self, num_tokens: float) -> float:
        weights = self.shape.num_layers * sum(matrix.size for matrix in self.shape.layer)
        rows = self.shape.num_layers * sum(matrix.inputs + matrix.outputs for matrix in self.shape.layer)
        return self._longer(2 * weights * num_tokens, self.shape.itemsize * (weights + rows * num_tokens))

    def _attention(self, num_tokens: float, queries: np.ndarray, lengths: np.ndarray) -> float:
        shape = self.shape
        # A query sees all before it and itself: query j of q, counted from 1, sees length - q + j.
        pairs = float((queries * (lengths - queries) + queries * (queries + 1) / 2).sum())
        flops = 4 * shape.num_layers * shape.num_heads * shape.head_size * pairs
        return self._longer(flops, shape.kv_bytes_per_token * (float(lengths.sum()) + num_tokens))

    def _head(self, num_rows: int) -> float:
        if not num_rows:
            return 0.0
        head = self.shape.head
        activations = num_rows * (head.inputs * self.shape.itemsize + head.outputs * 4)
        return self._longer(2 * head.size * num_rows, head.size * self.shape.itemsize + activations)

    def _launches(self) -> float:
        per_layer = LAYER_KERNELS + (ALL_REDUCES if self.num_devices > 1 else 0)
        return self.profile.launch_s * (self.shape.num_layers * per_layer + STEP_KERNELS)

    def _all_reduces(self, num_tokens: float) -> float:
        if self.num_devices == 1:
            return 0.0
        link = self.profile.link_bytes_per_s
        assert link is not None, "SimOptions refuses a group without a link"
        hidden_bytes = num_tokens * self.shape.head.inputs * self.shape.itemsize
        share = 2 * (self.num_devices - 1) / self.num_devices
        return ALL_REDUCES * self.shape.num_layers * share * hidden_bytes / link
