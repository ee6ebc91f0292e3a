"""The code in the README runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
    for block in blocks:
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_named_files_exist():
    text = README.read_text()
    package = README.parent / "wamrl_torchrl"
    for name in re.findall(r"\| `([a-z_/*.]+)` \|$", text, re.MULTILINE):
        assert list(package.glob(name.rstrip("/"))), name
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (README.parent / picture).exists(), picture
