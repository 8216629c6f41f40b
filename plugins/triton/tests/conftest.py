"""Kernels run under Triton's interpreter here. The setting counts for a whole process, before Triton is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # for `from plugins.triton.tests.paged import ...`


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Fails, with the way out, where something imported Triton before this file could ask for the interpreter."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(tl.sum, InterpretedFunction):
        pytest.fail(
            f"{sys.argv[0]} loaded Triton without its interpreter; set TRITON_INTERPRET=1 and run the tests again"
        )
