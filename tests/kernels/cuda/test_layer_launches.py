"""Launches of a layer are counted, and are the same kernels in every pass; so are the host's waits. Nothing runs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compiling import compiled

BESIDE = {"embed": 1, "norm_after_add": 1}
"""Launches of a pass outside its layers; attention also lists its work."""
OF_A_STEP = ("read_rows", "place_rows", "list_pieces", "multiply", "block_sums", "pick", "write_rows")
BESIDE_STEPS = BESIDE | dict.fromkeys(OF_A_STEP, 1)
"""Launches of a step outside its layers, the head's product among them."""
STEPS = ("", " by a library", " of many blocks")
LAYERS = 2
"""Of the base whose steps are watched."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return compiled(tmp_path_factory.mktemp("triton"), ("launched_layers", []), ("watched_passes", []))


@pytest.fixture(scope="module")
def made(both: list[list[Any]]) -> list[Any]:
    return both[0]


def test_a_layer_takes_nine_launches_and_eleven_with_any_number_of_adapters(made: list[Any]) -> None:
    """One more where attention has several pieces, two more in families with four norms."""
    steps = [line for line in made if "base" in line]
    assert {line["adapters"] for line in steps} == {0, 8, 64}
    for line in steps:
        launches = {name: n for name, n in line["launches"].items() if name != "list_pieces"}
        four_norms = line["base"] == "gemma2"
        per_layer = (sum(launches.values()) - sum(BESIDE.values())) / line["layers"]
        assert per_layer == 9 + 2 * (line["adapters"] > 0) + 2 * four_norms


def test_a_layer_is_trained_by_at_most_48_launches_with_any_number_of_adapters(made: list[Any]) -> None:
    """Forward and backward; three outside layers, and three fewer of the first, whose input has no gradient."""
    passes = [line for line in made if "trained" in line]
    assert {line["adapters"] for line in passes if not line["recompute"]} == {1, 8, 64}
    for line in passes:
        per_layer = {"llama": (35, 42), "gemma2": (39, 48), "olmo2": (35, 44)}[line["trained"]][line["recompute"]]
        assert sum(line["launches"].values()) == per_layer * line["layers"]


def test_the_host_reads_once_after_a_pass_or_a_step_and_waits_for_nothing_before(both: list[list[Any]]) -> None:
    """Logprobs and sums of all segments, or norms of all adapters; whatever is sent is in memory that is not paged out."""
    trained = [line for line in both[1] if line["work"] in ("score", "train", "step")]
    assert {(line["work"], line["adapters"]) for line in trained} == {
        (work, n) for work in ("score", "train", "step") for n in (8, 64)
    }
    for line in trained:
        assert line["reads"] == {"score": 1, "train": 2, "step": 1}[line["work"]]
        assert sum(line["launches"].values()) > 0
        assert line["sent"] > 0
        assert line["early"] == line["paged"] == 0, line


def test_the_host_waits_for_nothing_in_a_decoding_step_and_fetches_its_tokens_by_one_copy(
    both: list[list[Any]],
) -> None:
    """It sends one piece of memory if rows join, with their records and their adapters' addresses, and else nothing."""
    steps = [line for line in both[1] if line["work"].startswith("decode")]
    assert {(line["work"], line["adapters"]) for line in steps} == {
        (work + of, n) for work in ("decode", "decode again") for of in STEPS for n in (0, 8, 64)
    }
    for line in steps:
        assert line["reads"] == line["early"] == line["paged"] == 0, line
        assert line["fetched"] == 1
        assert line["sent"] == (not line["work"].startswith("decode again"))


@pytest.mark.parametrize("of", STEPS)
def test_a_step_takes_these_launches_with_any_number_of_adapters(both: list[list[Any]], of: str) -> None:
    """One of each outside its layers, with the head; a library adds one to each of the four products with adapters."""
    steps = [line for line in both[1] if line["work"] in (f"decode{of}", f"decode again{of}")]
    assert len(steps) == 6
    for line in steps:
        launches, adapted = dict(line["launches"]), line["adapters"] > 0
        assert launches.pop("write_changes", 0) == (line["work"] == f"decode{of}")
        layers = {name: n - BESIDE_STEPS.get(name.replace("library", "multiply"), 0) for name, n in launches.items()}
        assert {name: n for name, n in layers.items() if n} == {
            name: LAYERS * n for name, n in layer_of_a_step(of, adapted=adapted).items()
        }
        assert sum(layers.values()) <= LAYERS * (16 if "library" in of else 12 if adapted else 10)


def layer_of_a_step(of: str, *, adapted: bool) -> dict[str, int]:
    """Launches of a layer, by kernel."""
    library = "library" in of
    added = {"add_adapters": 2} | ({"shrink": 4} if library else {}) if adapted else {}
    combined = {"combine": 1} if "blocks" in of else {}
    products = {"library" if library else "multiply": 4}
    return {"norm_after_add": 2, "rotate_and_write": 1, "attend": 1, "gate_and_up": 1, **products, **added, **combined}


def test_prompts_are_read_without_a_wait_before_their_first_tokens(both: list[list[Any]]) -> None:
    """Tokens, logprobs and whether they are usable, after the last launch."""
    read = [line for line in both[1] if line["work"] == "read"]
    assert [line["adapters"] for line in read] == [0, 8, 64]
    for line in read:
        assert line["reads"] == 3
        assert line["early"] == line["paged"] == 0, line


def test_every_pass_asks_the_compiler_for_the_same_kernels(made: list[Any]) -> None:
    """Whatever its rows, adapters and ranks, and in training; only the launches that add adapters are more or fewer."""
    plans = [line for line in made if "plan" in line]
    assert len(plans) == 4
    for line in plans:
        passes = [{key for key in keys if "add_adapters" not in key} for keys in line["requests"]]
        assert all(keys == passes[0] for keys in passes)
        adding = [{key for key in keys if "add_adapters" in key} for keys in line["requests"]]
        assert not adding[0]
        assert all(keys == adding[1] for keys in adding[2:])
