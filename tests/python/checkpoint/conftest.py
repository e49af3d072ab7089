"""Where the checkpoint tests find what they share."""

import sys
from pathlib import Path

# Test files are imported by path, so their common modules have to be findable by name.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "optim"))
