"""write_grpc_code.py [--check]: the Python code of core/enginecore/server/grpc/enginecore.proto, with grpcio-tools.

--check says whether what is there is what the definition gives. Code of another version of the tools counts as the
same when it describes the same messages and services.
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent / "core"
FOLDER = Path("enginecore/server/grpc")
PROTO = FOLDER / "enginecore.proto"
NAMES = ("enginecore_pb2.py", "enginecore_pb2.pyi", "enginecore_pb2_grpc.py")
HEAD = "# Written by tools/write_grpc_code.py.\n# ruff: noqa\n# mypy: ignore-errors\n# fmt: off\n"


def generate(out: Path) -> tuple[dict[str, str], bytes]:
    """(file name -> text, the definition as protobuf's compiler understands it). `out` is an empty folder."""
    described = out / "set"
    command = ["protoc", f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}", f"--python_out={out}", f"--pyi_out={out}"]
    command += [f"--grpc_python_out={out}", f"--descriptor_set_out={described}", str(PROTO)]
    if code := protoc.main(command):
        raise SystemExit(code)
    texts = {name: HEAD + (out / FOLDER / name).read_text(encoding="utf-8") for name in NAMES}
    (file,) = FileDescriptorSet.FromString(described.read_bytes()).file
    _drop_json_names(file.message_type)
    return texts, file.SerializeToString(deterministic=True)


def _drop_json_names(messages: Any) -> None:
    """They follow from the names, and Python's code leaves them out."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        _drop_json_names(message.nested_type)


def problems() -> list[str]:
    """What in the tree is not what the definition gives."""
    with tempfile.TemporaryDirectory() as folder:
        texts, described = generate(Path(folder))
    found = []
    for name, text in texts.items():
        path = ROOT / FOLDER / name
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        if there != text and (not there or _versions(there) == _versions(text)):
            found.append(f"{path.name} is out of date: python tools/write_grpc_code.py")
    from enginecore.server.grpc import enginecore_pb2

    written = FileDescriptorProto.FromString(enginecore_pb2.DESCRIPTOR.serialized_pb)
    if written.SerializeToString(deterministic=True) != described:
        found.append("enginecore_pb2.py describes other messages: python tools/write_grpc_code.py")
    return found


def _versions(text: str) -> list[Any]:
    return re.findall(r"# Protobuf Python Version: (\S+)|GRPC_GENERATED_VERSION = '(\S+)'", text)


def main() -> int:
    if "--check" in sys.argv[1:]:
        found = problems()
        print("\n".join(found) or "in step")
        return bool(found)
    with tempfile.TemporaryDirectory() as folder:
        texts, _ = generate(Path(folder))
    for name, text in texts.items():
        (ROOT / FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
