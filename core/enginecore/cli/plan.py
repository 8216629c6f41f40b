"""`enginecore plan`: where a device's memory would go for a model, and why, before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from enginecore.cli.common import with_engine
from enginecore.config import EngineArgs, ReadyInfo


@with_engine
def plan(
    engine: EngineArgs,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")] = False,
) -> None:
    """Where the memory of a device would go: weights, activations and KV blocks, and why so many. Reads no weights.

    Example: enginecore plan --device cpu --max-model-len 4096
    """
    from enginecore.cli.devices import print_json
    from enginecore.engine.start import plan_start

    ready = plan_start(engine)
    report = plan_report(ready)
    if as_json:
        print_json(report)
        return
    for owner, size in report["ledger"].items():
        typer.echo(f"{owner:>16} {size:>18,} bytes")
    kv, where = report["kv_cache"], f"\n{report['model']} on {report['device']} in {report['dtype']}"
    if ready.config.pooling is not None:
        typer.echo(f"{where}: for pooling texts of up to {report['max_model_len']:,} tokens, without a KV cache")
    else:
        typer.echo(
            f"{where}: {kv['num_blocks']:,} KV blocks of {kv['block_size']} tokens hold {kv['tokens']:,} tokens, "
            f"{kv['full_sequences']} sequences of {report['max_model_len']:,} tokens"
            + (f", kept in {kv['dtype']}" if kv["dtype"] else "")
        )
    for choice in report["choices"]:
        typer.echo(f"  {choice['setting']} {choice['value']}: {choice['reason']}")


def plan_report(ready: ReadyInfo) -> dict[str, Any]:
    """A plan as plain data. `ledger` is in bytes; `usable` and `budget` bound the others."""
    config = ready.config
    tokens = config.num_blocks * config.block_size
    kv_bytes = ready.ledger.get("kv_cache")
    return {
        "model": config.served_model_name,
        "device": ready.device_summary,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "ledger": ready.ledger,
        "kv_cache": {
            "num_blocks": config.num_blocks,
            "block_size": config.block_size,
            "block_bytes": None if kv_bytes is None else kv_bytes // config.num_blocks,
            "dtype": config.kv_cache_dtype or None,
            "tokens": tokens,
            "full_sequences": tokens // config.max_model_len,
        },
        "choices": [{"setting": name, "value": value, "reason": reason} for name, value, reason in config.choices],
    }
