"""Whether the host works while the device is at a step, and how: decided once, when an engine is built.

ahead    the device's work goes on when a call returns: steps are submitted from the engine's thread, and the tokens
         of one stay on the device, where the next reads them
beside   a call returns when its work is done: steps are run by a thread of their own
off      a step is run, then booked, then the next is planned
"""

from __future__ import annotations

from typing import Literal

from enginecore.engine.site import Site
from enginecore.errors import UnsupportedError

Overlap = Literal["ahead", "beside", "off"]


def choose_overlap(site: Site) -> Overlap:
    """What `args.overlap` comes to on this device; the choice is noted. Raises UnsupportedError for "on" with settings
    that need the steps in the engine's thread."""
    args, backend = site.args, site.backend
    overlap, reason = _choose(site)
    if overlap == "beside":
        reasons = []
        if args.kv_host_memory is not None or args.kv_disk is not None:
            reasons.append("blocks are moved between memories (kv_host_memory, kv_disk)")
        if args.enable_lora:
            reasons.append("adapters are loaded while it runs (enable_lora)")
        if reasons:
            raise UnsupportedError(
                f"overlap on runs steps in a thread of their own on {site.selected.device}, which goes with neither",
                reasons=tuple(reasons),
                fix="leave overlap at auto",
            )
    if args.overlap != "auto" or backend.capabilities.asynchronous:
        site.choices.note("overlap", overlap, reason)
    return overlap


def _choose(site: Site) -> tuple[Overlap, str]:
    if site.args.overlap == "off":
        return "off", "it is switched off"
    capabilities = site.backend.capabilities
    if site.backend.runtime is None and capabilities.asynchronous:
        return "ahead", "the device works asynchronously: the next step is planned meanwhile"
    if site.args.overlap == "on":
        return "beside", "steps are run by a thread of their own, the next is planned meanwhile"
    if capabilities.asynchronous:
        return "off", "the device's plugin runs whole models itself and is given tokens that the host knows"
    return "off", "the device's plugin does not claim to work asynchronously"
