"""How much memory the largest step takes beside weights and cache, by running one.

Shape suffixes: T tokens, S sequences.
"""

from __future__ import annotations

import torch

from enginecore.device import AttentionMetadata, Backend
from enginecore.errors import OutOfDeviceMemory
from enginecore.models.loader import Model
from enginecore.ops.dispatch import Ops

#: A decode step over texts of this length needs as much workspace as over longer ones: kernels cut them in no more
#: pieces.
LONG_TEXT = 8192


def can_measure(backend: Backend) -> bool:
    """Whether the books show what a step takes: memory of its own, counted by process."""
    return backend.capabilities.per_process_accounting and not backend.capabilities.unified_memory


@torch.inference_mode()  # type: ignore[untyped-decorator]
def measure_activations(
    model: Model, backend: Backend, ops: Ops, caches: list[torch.Tensor], tokens: int, seqs: int, max_len: int
) -> int:
    """Bytes of the largest prefill or decode step and of sampling after it. `caches` have at least one block each, and
    are released.

    Nothing is written into the cache (slots of -1), and all that is read lies in block 0. Raises OutOfDeviceMemory when
    such a step does not fit at all.
    """
    memory = backend.memory
    seqs = min(seqs, tokens)
    for cache in caches:
        cache.zero_()
    backend.synchronize()
    memory.empty_cache()
    before = memory.process_used_bytes()
    memory.reset_peak()
    try:
        # As many sequences as may run, the first of them with all the tokens that are left over.
        lengths = [tokens - seqs + 1, *[1] * (seqs - 1)]
        _step(model, backend, ops, caches, lengths, lengths)
        _step(model, backend, ops, caches, [1] * seqs, [min(max_len, LONG_TEXT)] * seqs)
        backend.synchronize()
        peak = memory.peak_bytes()
    except Exception as error:
        if not memory.out_of_memory(error):
            raise
        info = memory.memory_info()
        raise OutOfDeviceMemory(
            f"the largest step, {tokens} tokens in {seqs} sequences, does not fit beside the weights: "
            f"{info.free_bytes} of {info.total_bytes} bytes are free ({str(error).strip().splitlines()[0]})",
            fix="lower max_num_batched_tokens or max_num_seqs, or choose a larger device",
        ) from None
    memory.release_kv(caches)
    memory.empty_cache()
    return max(0, peak - before)


def _step(
    model: Model, backend: Backend, ops: Ops, caches: list[torch.Tensor], query_lens: list[int], seq_lens: list[int]
) -> None:
    assert backend.attention is not None
    device, seqs, total = backend.torch_device(), len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=starts.to(device=device, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        # Wide enough for blocks of a single token: a table may be wider than its sequences need.
        block_table=torch.zeros(seqs, max(seq_lens), dtype=torch.int32, device=device),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    ids_T = torch.zeros(total, dtype=torch.int64, device=device)
    last_S = (starts[1:] - 1).to(device)
    logits_SV = model.forward(ids_T, ids_T, backend.attention.build_metadata(metadata), caches, last_S)
    ones_S = torch.ones(seqs, device=device)
    top_k_S = torch.zeros(seqs, dtype=torch.int64, device=device)
    ops.sample(logits_SV, ones_S, top_k_S, ones_S * 0.9, ones_S * 0, ones_S.double() * 0.5)
