"""Makes the world of two teams of the env tests importable here, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "env"))
