"""The guide's code runs as it stands."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rollstream.schemas import Status

GUIDE = Path(__file__).parents[1] / "docs" / "environments.md"


def test_the_guides_code_runs_and_the_environment_of_its_own_is_won(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    opening, view, own, trying = blocks
    assert len(own.strip().splitlines()) <= 45
    assert len([line for line in own.splitlines() if line.strip()]) <= 33
    names: dict[str, object] = {}
    for block in (opening, view):
        exec(compile(block, str(GUIDE), "exec"), names)
    nim = ModuleType("nim")
    monkeypatch.setitem(sys.modules, "nim", nim)
    exec(compile(own, str(GUIDE), "exec"), vars(nim))
    exec(compile(trying, str(GUIDE), "exec"), names)

    trajectory = names["trajectory"]
    assert getattr(trajectory, "status", None) is Status.COMPLETED
    assert getattr(trajectory, "reward", None) == 1.0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("USER ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("ASSISTANT ")
