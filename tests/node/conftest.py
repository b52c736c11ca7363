"""What tests of founding and of nodes begin with."""

from pathlib import Path

import pytest
from tests.node.founded import TEXT


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path
