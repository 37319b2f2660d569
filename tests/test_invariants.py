"""Each invariant that ARCHITECTURE.md promises is cited by a test, and each citation exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_promises_and_citations_match() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    promised = set(re.findall(r"^- \*\*(I\d+)\*\*", text, re.MULTILINE))
    cited = {
        number
        for path in (ROOT / "tests").rglob("test_*.py")
        for number in re.findall(r"\bI\d+\b", path.read_text(encoding="utf-8"))
    }
    assert promised
    assert cited == promised
