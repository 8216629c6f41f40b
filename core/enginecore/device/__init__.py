"""The plugin contract, version 1.1: what a device vendor implements and all that the core knows of a device."""

from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.backend import Backend
from enginecore.device.capabilities import (
    AttentionQuery,
    Capabilities,
    GraphSupport,
    ShapePolicy,
    Verdict,
    VerdictStatus,
    check_attention,
)
from enginecore.device.collectives import CollectiveError, Communicator, GroupSpec
from enginecore.device.contract import CONTRACT_VERSION, Contract, contract_version, optional
from enginecore.device.graphs import GraphKey, GraphRunner
from enginecore.device.hardware import PciDevice, find_library, pci_devices
from enginecore.device.hookspecs import hookimpl
from enginecore.device.manifest import (
    BackendContext,
    ConfigContext,
    DoctorContext,
    DoctorFinding,
    Manifest,
    ProbeCause,
    ProbeContext,
    ProbeResult,
    ProbeStatus,
)
from enginecore.device.memory import KVCacheLayout, KVCacheSpec, MemoryInfo, MemoryManager
from enginecore.device.optable import Impl, OpQuery, OpTable
from enginecore.device.runtime import ModelRuntime, ModelSpec, RuntimeBatch, RuntimeMemory
from enginecore.device.torch_build import torch_problem

__all__ = [
    "CONTRACT_VERSION",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionParams",
    "AttentionQuery",
    "Backend",
    "BackendContext",
    "Capabilities",
    "CollectiveError",
    "Communicator",
    "ConfigContext",
    "Contract",
    "DoctorContext",
    "DoctorFinding",
    "GraphKey",
    "GraphRunner",
    "GraphSupport",
    "GroupSpec",
    "Impl",
    "KVCacheLayout",
    "KVCacheSpec",
    "Manifest",
    "MemoryInfo",
    "MemoryManager",
    "ModelRuntime",
    "ModelSpec",
    "OpQuery",
    "OpTable",
    "PciDevice",
    "ProbeCause",
    "ProbeContext",
    "ProbeResult",
    "ProbeStatus",
    "RuntimeBatch",
    "RuntimeMemory",
    "ShapePolicy",
    "Verdict",
    "VerdictStatus",
    "check_attention",
    "contract_version",
    "find_library",
    "hookimpl",
    "optional",
    "pci_devices",
    "torch_problem",
]
