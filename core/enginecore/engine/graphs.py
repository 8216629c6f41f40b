"""Graphs when an engine is built: memory is reserved for them, they are captured, and what became of it is told."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from enginecore.device import GraphSupport
from enginecore.errors import UnsupportedError
from enginecore.runner.graphs import GraphedModel, GraphPlan
from enginecore.runner.model import PagedModel, StepModel

if TYPE_CHECKING:
    from enginecore.engine.site import Site

logger = logging.getLogger("enginecore.engine")


def require_graphs(site: Site, reason: str) -> None:
    """Graphs are not to be had, for `reason`: UnsupportedError if the user requires them."""
    if site.args.require_graphs:
        device = f"{site.selected.device} ({site.selected.plugin.label})"
        raise UnsupportedError(
            f"{device} cannot replay steps as graphs, which require_graphs asks for: {reason}",
            fix="run without --require-graphs; steps then run eagerly",
        )


def capture_graphs(
    site: Site, model: PagedModel, plan: GraphPlan, ledger: dict[str, int], max_model_len: int
) -> StepModel:
    """The model with its graphs, or as it is; `ledger["graphs"]` shrinks to what they hold, and the choice is noted."""
    if not plan.keys:
        if site.backend.graphs is not None:
            site.choices.note("graphs", "off", plan.reason)
        return model
    width = -(-max_model_len // site.args.block_size)
    graphed = GraphedModel(model, site.backend, plan, width, max_model_len)
    graphed.capture()
    assert site.backend.graphs is not None
    ledger["graphs"] = site.backend.graphs.memory_bytes()
    if graphed.failure is not None:
        require_graphs(site, graphed.failure)
        logger.warning("graphs for %s, other steps run eagerly: %s", _told(graphed), graphed.failure)
    else:
        logger.info("graphs for %s, %d bytes", _told(graphed), ledger["graphs"])
    support = site.backend.capabilities.graph_support
    reason = f"the device's graph support is {support.value!r}"
    if support is not GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE:
        reason += ", of which steps of one token a sequence are used"
    site.choices.note("graphs", _told(graphed), graphed.failure or reason)
    return graphed if graphed.sizes else model


def _told(graphed: GraphedModel) -> str:
    sizes = graphed.sizes
    return f"{len(sizes)} batch sizes up to {sizes[-1]}" if sizes else "no batch size"
