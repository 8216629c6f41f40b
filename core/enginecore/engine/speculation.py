"""Whether tokens are guessed: decided once, when an engine is built."""

from __future__ import annotations

from typing import Literal

from enginecore.engine.site import Site


def speculation_at(site: Site) -> Literal["off", "ngram"]:
    """What `args.speculation` comes to on this device."""
    return choose_speculation(site)[0]


def choose_speculation(site: Site) -> tuple[Literal["off", "ngram"], str]:
    """The same, and why: "auto" guesses where that changes no answer and takes nothing from others."""
    asked, capabilities = site.args.speculation, site.backend.capabilities
    if asked != "auto":
        return asked, "as was asked"
    if site.backend.runtime is not None:
        return "off", "the device's plugin runs whole models itself, guesses cannot be checked there"
    if not capabilities.batch_invariant:
        return "off", "the device may compute a token otherwise beside others: guesses could change answers"
    if capabilities.asynchronous or site.args.overlap == "on":
        return "off", "steps are planned before the tokens of the last one are known"
    return "ngram", "guesses change no answer here and are made where they pay; --speculation off does without"
