"""Makes `batches` importable: pytest's importlib mode leaves the test folder off the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
