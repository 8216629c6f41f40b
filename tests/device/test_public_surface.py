"""The contract's surface equals its snapshot, and only additive changes may be written into it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tests.device.public_surface import SNAPSHOT, breaking_changes, surface


def recorded() -> dict[str, Any]:
    return json.loads(SNAPSHOT.read_text())


def test_nothing_that_plugins_build_on_has_changed() -> None:
    assert breaking_changes(recorded(), surface()) == []


def test_the_snapshot_is_up_to_date() -> None:
    assert recorded() == surface(), "run: python -m tests.device.public_surface"


def _drop_name(s: dict[str, Any]) -> None:
    del s["names"]["Manifest"]


def _drop_field(s: dict[str, Any]) -> None:
    del s["names"]["Manifest"]["fields"]["torch_min"]


def _require_field(s: dict[str, Any]) -> None:
    s["names"]["Manifest"]["fields"]["colour"] = {"type": "str", "required": True}


def _require_method(s: dict[str, Any]) -> None:
    s["names"]["MemoryManager"]["methods"]["defragment"] = {"parameters": {}, "required": True}


def _make_required(s: dict[str, Any]) -> None:
    s["names"]["MemoryManager"]["methods"]["sleep"]["required"] = True


def _retype(s: dict[str, Any]) -> None:
    s["names"]["KVCacheSpec"]["fields"]["head_size"]["type"] = "str"


def _drop_member(s: dict[str, Any]) -> None:
    del s["names"]["ProbeStatus"]["members"]["ABSENT"]


def _require_parameter(s: dict[str, Any]) -> None:
    s["hooks"]["enginecore_probe"]["hurry"] = {"kind": "POSITIONAL_OR_KEYWORD", "required": True, "type": "bool"}


def _reorder(s: dict[str, Any]) -> None:
    method = s["names"]["AttentionBackend"]["methods"]["copy_blocks"]
    method["parameters"] = dict(reversed(method["parameters"].items()))


def _require_hook(s: dict[str, Any]) -> None:
    s["required_hooks"].append("enginecore_doctor")


def _change_an_op(s: dict[str, Any]) -> None:
    s["ops"]["rms_norm"] = s["ops"]["rms_norm"].replace("eps", "epsilon")


def _drop_kit_field(s: dict[str, Any]) -> None:
    del s["testing"]["DeclaredGap"]["fields"]["expires"]


def _drop_starting_point(s: dict[str, Any]) -> None:
    del s["torch_backend"]["TorchAttention"]["methods"]["forward"]


@pytest.mark.parametrize(
    "change",
    [
        _change_an_op,
        _drop_kit_field,
        _drop_starting_point,
        _drop_name,
        _drop_field,
        _require_field,
        _require_method,
        _make_required,
        _retype,
        _drop_member,
        _require_parameter,
        _reorder,
        _require_hook,
    ],
)
def test_a_breaking_change_is_seen(change: Any) -> None:
    changed = copy.deepcopy(recorded())
    change(changed)
    assert breaking_changes(recorded(), changed)


def test_an_addition_is_no_break() -> None:
    changed = copy.deepcopy(recorded())
    changed["names"]["NewThing"] = {"kind": "class", "contract": False, "methods": {}}
    changed["names"]["Manifest"]["fields"]["colour"] = {"type": "str", "required": False}
    changed["names"]["MemoryManager"]["methods"]["defragment"] = {"parameters": {}, "required": False}
    changed["names"]["ProbeStatus"]["members"]["ASLEEP"] = "asleep"
    assert breaking_changes(recorded(), changed) == []
