from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.peft_files import save_random


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random adapter on the small base."""
    directory = tmp_path_factory.mktemp("adapters") / "adapter"
    save_random(directory)
    return directory
