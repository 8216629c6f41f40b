"""The one run that proves enginecore on a GPU: under five minutes, nothing downloaded, one JSON and a short table.

    python plugins/cuda/bench/on_gpu.py --out on_gpu.json             on a machine with an NVIDIA GPU
    python plugins/cuda/bench/on_gpu.py --device cpu --tiny           the same steps, small, on any machine

Works on an installation or straight from a checkout (then the packages are made visible for the run alone). Each stage
is a process with a time limit of its own; one that fails, hangs or dies is reported with what it had found, and the
rest goes on. Stages: machine, kit (conformance levels 0 to 6), parity, attention, steps, throughput.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
#: Seconds that a stage may take; the whole is cut to `--budget`.
STAGES = {"machine": 40, "kit": 130, "parity": 60, "attention": 40, "steps": 60, "throughput": 80}
#: What the engine needs beside torch and transformers.
NEEDED = ("pluggy", "msgspec", "zmq", "llguidance", "packaging", "numpy", "safetensors", "hypothesis")

#: What is measured against what: (name, path in the results, target, whether more is better).
TARGETS = (
    ("conformance: cases that fail", ("kit", "failed"), 0, False),
    ("greedy tokens that differ from transformers (float32)", ("parity", "different"), 0, False),
    ("decode attention, share of copy bandwidth (batch 64, 4k, GQA 8)", ("attention", "decode_share"), 0.85, True),
    ("prefill attention against scaled_dot_product_attention", ("attention", "prefill_ratio"), 0.9, True),
    ("step time with graphs over without, batch 1", ("steps", "graph_ratio"), 1.0, False),
)


def make_visible() -> dict[str, str]:
    """An environment in which the packages of this checkout can be imported and are found as plugins, and this process
    with it. Nothing happens where they are installed."""
    environ = dict(os.environ)
    try:
        metadata.distribution("enginecore-cuda")
    except metadata.PackageNotFoundError:
        folder = Path(tempfile.mkdtemp(prefix="enginecore-checkout-"))
        paths = [folder, ROOT / "core"]
        for plugin in ("cuda", "triton", "cpu", "sim"):
            info = folder / f"enginecore_{plugin}-0.1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: enginecore-{plugin}\nVersion: 0.1.0\n")
            if plugin != "triton":
                text = f"[enginecore.backends]\n{plugin} = enginecore_{plugin}.plugin\n"
                (info / "entry_points.txt").write_text(text)
            paths.append(ROOT / "plugins" / plugin)
        sys.path[:0] = [str(path) for path in paths]
        environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), environ.get("PYTHONPATH", "")])
    environ.setdefault("HF_HUB_OFFLINE", "1")
    environ.setdefault("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "enginecore-triton-cache"))
    return environ


def run_stage(name: str, seconds: float, options: argparse.Namespace, environ: dict[str, str]) -> dict[str, Any]:
    """The stage's findings; "error" says what went wrong, "seconds" how long it took."""
    target, begun = Path(options.work) / f"{name}.json", time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), "--stage", name, "--device", options.device]
    command += ["--work", options.work, "--seconds", str(seconds), *(["--tiny"] if options.tiny else [])]
    log = (Path(options.work) / f"{name}.log").open("w+")
    process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Whatever a stage has started ends with it; the group is its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    if code != 0:
        log.seek(0)
        tail = log.read()[-1500:].strip()
        found.setdefault("error", f"took longer than {seconds:.0f} s" if code is None else f"exit code {code}")
        found["output"] = tail
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def lookup(results: dict[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = results
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def summary(results: dict[str, Any]) -> list[str]:
    """The short table."""
    lines = []
    for title, path, target, more in TARGETS:
        value = lookup(results, path)
        if value is None:
            lines.append(f"{'?':>9}  {title}: not measured")
            continue
        good = value >= target if more else value <= target
        sign = ">=" if more else "<="
        lines.append(f"{'ok' if good else 'MISSED':>9}  {title}: {value:.4g} (target {sign} {target})")
    for batch, row in (lookup(results, ("throughput", "batches")) or {}).items():
        told = ", ".join(f"{name} {value:.0f}" for name, value in row.items() if isinstance(value, (int, float)))
        lines.append(f"{'':>9}  tokens/s at batch {batch}: {told}")
    for name, found in results.items():
        if isinstance(found, dict) and found.get("error"):
            why = next(iter(found.get("failures", {}).values()), found.get("output", ""))
            lines.append(f"{'FAILED':>9}  stage {name}: {found['error']}: {str(why)[:200]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script itself")
    parser.add_argument("--out", default="on_gpu.json", metavar="FILE")
    parser.add_argument(
        "--report", metavar="FILE", help="write the conformance report too, as docs/conformance has them"
    )
    parser.add_argument("--budget", type=float, default=285, metavar="SECONDS", help="for all stages together")
    parser.add_argument("--stages", default=",".join(STAGES), help="which, and in which order")
    parser.add_argument("--work", help="a folder for models and logs; a temporary one by default")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    environ = make_visible()
    if options.stage:
        import gpu_stages

        return int(gpu_stages.run(options.stage, options))
    missing = [name for name in NEEDED if not _importable(name)]
    temporary = None if options.work else tempfile.TemporaryDirectory(prefix="enginecore-on-gpu-")
    options.work = options.work or temporary.name  # type: ignore[union-attr]
    Path(options.work).mkdir(parents=True, exist_ok=True)
    begun, results = time.monotonic(), {"missing_packages": missing, "tiny": options.tiny, "device": options.device}
    for name in options.stages.split(","):
        left = options.budget - (time.monotonic() - begun)
        if left < 5:
            results[name] = {"error": "not run: no time was left"}
            continue
        print(f"{name} ...", file=sys.stderr, flush=True)
        results[name] = run_stage(name, min(STAGES[name], left), options, environ)
        Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    results["total_seconds"] = round(time.monotonic() - begun, 1)
    report = lookup(results, ("kit", "report"))
    if options.report and report:
        Path(options.report).write_text(json.dumps(report, indent=1) + "\n")
    Path(options.out).write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(summary(results)))
    return 1 if any(isinstance(found, dict) and found.get("error") for found in results.values()) else 0


def _importable(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


if __name__ == "__main__":
    sys.exit(main())
