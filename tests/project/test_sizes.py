"""`scripts/sizes.py` counts what is there."""

from __future__ import annotations

import pytest

from sizes import Size, here, room_of, sizes

pytestmark = pytest.mark.tier1


def test_sizes_count_lines_statements_and_modules_by_room() -> None:
    sources = {
        "src/motet/core/suggestions.py": '"""Text."""\n\nimport os\n\nif os:\n    x = 1\n',
        "src/motet/core/__init__.py": "",
        "src/motet/__init__.py": "x = 1\n",
        "tests/core/test_near.py": "assert True\n",
        "docs/page.py": "x = 1\n",
    }
    assert sizes(sources) == {
        "src": Size(7, 5, 3),
        "src core": Size(6, 4, 2),
        "src __init__": Size(1, 1, 1),
        "tests": Size(1, 1, 1),
    }


def test_sizes_read_the_files_of_this_tree() -> None:
    assert "src/motet/core/types.py" in here()
    assert all(room_of(file) for file in here())
