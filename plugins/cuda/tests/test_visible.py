"""Masks of visible devices and names of MIG slices."""

from __future__ import annotations

import pytest
from enginecore_cuda.visible import Visible, mask_hint, parse_mask, slice_of

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
SLICE = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"


@pytest.mark.parametrize(
    ("mask", "kinds"),
    [
        ("0,2, 1", ["index"] * 3),
        (UUID, ["gpu"]),
        ("GPU-8932f937", ["gpu"]),  # the beginning of one is enough
        (f"{SLICE}", ["mig"]),
        ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", ["mig"]),
        ("0,-1,1", ["index"]),  # as the driver reads it, the list ends there
        ("all", []),
        ("", []),
        ("1,1", []),
    ],
)
def test_masks(mask: str, kinds: list[str]) -> None:
    assert [device.kind for device in parse_mask(mask)] == kinds


def test_entries_keep_their_order_and_value() -> None:
    assert parse_mask("03,1") == [Visible("index", "3"), Visible("index", "1")]


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        ("0", "names 1 device(s)"),
        ("0,no,1", "what follows 'no' does not count"),
        ("1,1", "stands there twice, which hides all"),
        (f"{SLICE},MIG-00000000-a75d-5afc-978f-d2f1294409fd", "one MIG slice only"),
    ],
)
def test_hints(mask: str, told: str) -> None:
    assert told in mask_hint({"CUDA_VISIBLE_DEVICES": mask})
    assert mask_hint({}) == ""


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb", "1c.2g.20gb"),
        ("NVIDIA H200", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_slices(name: str, profile: str | None) -> None:
    assert slice_of(name) == profile
