"""What of the attention kernels is compiled ahead of time: the shapes that models have, and each path of the code."""

from __future__ import annotations

from typing import Any

from enginecore_triton.aot_case import AotCase
from enginecore_triton.launch import power_of_two

_POINTERS = {
    "q_ptr": "*bf16:16", "cache_ptr": "*bf16:16", "table_ptr": "*i32:16", "lengths_ptr": "*i32:16",
    "starts_ptr": "*i32:16", "out_ptr": "*bf16:16", "part_ptr": "*fp32:16", "log_ptr": "*fp32:16",
}  # fmt: skip
_STRIDES = dict.fromkeys(
    ("stride_q_token", "stride_q_head", "stride_block", "stride_side", "stride_head", "stride_out_token",
     "stride_out_head"), "i32:16"
)  # fmt: skip
_SCALARS = {"scale": "fp32", "num_parts": "i32", "num_seqs": "i32", "stride_table": "i32"}
_FEATURES = {
    "sinks_ptr": "*bf16:16", "slopes_ptr": "*fp32:16", "soft_cap": "fp32", "window": "i32",
    "key_scale_ptr": "*fp32:16", "value_scale_ptr": "*fp32:16",
}  # fmt: skip
#: dtype -> (Triton's name of what the kernel reads, bytes).
_TYPES = {
    "float32": ("fp32", 4), "bfloat16": ("bf16", 2), "float16": ("fp16", 2), "float8_e4m3fn": ("u8", 1),
    "float8_e5m2": ("u8", 1), "int8": ("i8", 1),
}  # fmt: skip
_NATIVE = frozenset({"sm_89", "sm_90", "sm_100", "gfx950"})


def _case(
    kernel: Any, config: str, *, dtype: str = "bfloat16", kv: str = "", size: int = 128, group: int = 4,
    block_size: int = 16, features: tuple[str, ...] = (), causal: bool = True, native: bool = False,
    constants: dict[str, Any],
) -> AotCase:  # fmt: skip
    kv = kv or dtype
    quantised = kv.startswith("float8")
    used = set(features) | ({"key_scale_ptr", "value_scale_ptr"} if quantised else set())
    signature = {**_POINTERS, **_STRIDES, **_SCALARS, **{name: _FEATURES[name] for name in used}}
    signature["q_ptr"] = signature["out_ptr"] = f"*{_TYPES[dtype][0]}:16"
    signature["cache_ptr"] = f"*{_TYPES[kv][0]}:16"
    block_d = power_of_two(size, 16)
    words = [dtype, *([f"{kv} cache"] if kv != dtype else []), *(["hardware fp8"] if native else []), f"head {size}",
             f"{group} to 1", *(name.removesuffix("_ptr").replace("_", " ") for name in features),
             *([] if causal else ["non-causal"]),
             *([f"blocks of {block_size}"] if block_size != 16 else []),
             *(["in parts"] if config == "paged_prefill" and constants["SPLIT"] else [])]  # fmt: skip
    return AotCase(
        name=", ".join(words), kernel=kernel, signature=signature, config=config,
        sizes={
            "head_size": block_d, "itemsize": _TYPES[dtype][1], "kv_itemsize": _TYPES[kv][1],
            "rows": constants.get("BLOCK_M", 0),
        },
        only=_NATIVE if native else None,
        constants={
            **{name: None for name in _FEATURES if name not in used}, "GROUP": group, "CAUSAL": causal,
            "HEAD_SIZE": size, "BLOCK_D": block_d, "BLOCK_SIZE": block_size,
            "FORMAT": kv if _TYPES[kv][1] == 1 else "float", "NATIVE_FP8": native,
            **constants,
        },
    )  # fmt: skip


def decode_cases(kernel: Any, least: int) -> list[AotCase]:
    def case(queries: int = 1, split: bool = True, **rest: Any) -> AotCase:
        block_m = power_of_two(rest.get("group", 4) * queries, 16)
        constants = {"QUERIES": queries, "SPLIT": split, "LEAST": least, "BLOCK_M": block_m}
        return _case(kernel, "paged_decode", constants=constants, **rest)

    return [
        case(size=128, group=8),
        case(size=128, group=8, queries=8, split=False, block_size=64),
        case(size=256, group=2, features=("soft_cap", "window")),
        case(size=64, group=8, features=("sinks_ptr", "window")),
        case(size=80, group=1, features=("slopes_ptr",), dtype="float16"),
        case(size=128, kv="float8_e4m3fn"),
        case(size=128, kv="float8_e4m3fn", native=True),
        case(size=128, kv="int8", group=8),
        case(size=64, dtype="float32"),
    ]


def prefill_cases(kernel: Any, least: int) -> list[AotCase]:
    def case(split: bool = False, **rest: Any) -> AotCase:
        return _case(kernel, "paged_prefill", constants={"FEWEST": 9, "SPLIT": split, "LEAST": least}, **rest)

    return [
        case(size=64, group=7),
        case(size=128, group=8),
        case(size=256, group=2, features=("soft_cap", "window")),
        case(size=64, group=8, features=("sinks_ptr", "window")),
        case(size=80, group=1, features=("slopes_ptr",), dtype="float16", causal=False, block_size=128),
        case(size=128, kv="float8_e4m3fn"),
        case(size=128, kv="int8"),
        case(size=64, dtype="float32"),
        case(size=128, group=4, split=True),
        case(size=64, group=8, split=True, features=("sinks_ptr", "window")),
    ]
