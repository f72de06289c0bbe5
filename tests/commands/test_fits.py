"""`motet fits`: sizes from a config.json alone are those of the loaded base, and what was measured lies within the estimate."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.fits import BASES, BEGIN, END, PAGE, read, written
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.commands.fits import CARDS, GIB, Card, Fit, Work, chosen, fit, fits, own_pass_bytes, pass_bytes
from motet.core.errors import BaseModelError, ConfigError
from motet.core.model_info import ALL_LINEAR
from motet.model.load import load_base
from motet.model.outline import BaseOutline, outline
from motet.training.memory import pass_memory
from tests.support import tiny_models as tiny
from tests.support.cases import few
from tests.support.hub_server import HubServer, environment

(H200,) = chosen(["h200"])
SHORT = Work(adapters=8, tokens=128)
SHAPE_8B = {**BASES["Llama 3.1 8B"]}


def fitting(base: BaseOutline, card: Card, work: Work) -> Fit:
    """The first way in which it fits."""
    found = fit(base, card, work)
    assert found is not None
    return found


SIZED = ["llama", "phi3", "gemma3_mixed", "qwen3_moe", "gpt_oss", "deepseek_v2", "qwen3_5", "gpt_neox", "qwen3_vl"]


@pytest.mark.parametrize("name", few(SIZED, "gemma3_mixed", "gpt_oss", "deepseek_v2", "qwen3_5"))
def test_the_sizes_are_those_of_the_loaded_base(name: str) -> None:
    found, base = outline(str(tiny.directory(name))), tiny.base(name, "bfloat16")
    info = base.info
    assert (found.n_parameters, found.max_positions) == (info.n_parameters, info.max_positions)
    assert (found.kv_bytes_per_token, found.state_bytes) == (info.kv_bytes_per_token, info.state_bytes)
    assert found.adapter_size(ALL_LINEAR, 8) == base.adapter_layout(ALL_LINEAR, 8).size


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_is_measured_between_half_and_twice_of_the_estimate(small_base_dir: Path, recompute: bool) -> None:
    base = load_base(str(small_base_dir), dtype="bfloat16", device="cpu")
    measured = 2048 * pass_memory(base, recompute=recompute).whole  # without what attention on a CPU adds
    assert 0.5 < measured / pass_bytes(outline(str(small_base_dir)), 2048, recompute=recompute) < 2


def test_what_an_h200_showed_lies_within_the_estimate() -> None:
    """The 8B shape with 8,192 tokens of gradients took 74 GB; limits and rates are those of the same day."""
    base = read(SHAPE_8B)
    assert base.n_parameters == 8_030_261_248
    whole = base.weight_bytes + pass_bytes(base, 8192, recompute=False)
    assert 0.8 < whole / 74e9 < 1.25
    assert (
        0.8 < (base.weight_bytes + own_pass_bytes(base, 8192, 16, recompute=False)) / 49.7e9 < 1.25
    )  # of a trial program
    found, small = fitting(base, H200, SHORT), fitting(read(BASES["Qwen2.5 0.5B"]), H200, SHORT)
    assert found.decode == pytest.approx(16_900, rel=0.1)
    assert found.gradients == pytest.approx(24_700, rel=0.1)
    assert found.reached == pytest.approx(2160, rel=0.1)
    assert small.reached == pytest.approx(5530, rel=0.1)
    assert all(one.reached < one.decode for one in (found, small))
    assert not fitting(read(BASES["Qwen3 30B-A3B"]), H200, SHORT).reached


def test_a_sequence_longer_than_a_pass_is_counted_as_computed_again() -> None:
    """Kept whole, it would not fit."""
    base, long = read(SHAPE_8B), Work(rows=1, tokens=40_000)
    assert own_pass_bytes(base, long.tokens, 16, recompute=False) > H200.memory
    found = fitting(base, H200, long)
    assert found.way == "bfloat16"
    assert found.weights + own_pass_bytes(base, long.tokens, 16, recompute=True) < H200.memory


def test_a_base_is_packed_where_it_does_not_fit_whole() -> None:
    base = read(SHAPE_8B)
    ways = [fitting(base, card, Work(adapters=8)).way for card in chosen(["RTX 4090", "A100 40", "H100"])]
    assert ways == ["8 bits", "bfloat16", "bfloat16"]
    assert fit(read(BASES["Qwen3 32B"]), chosen(["L4 "])[0], Work()) is None
    least, most = (fitting(base, H200, Work(rank=rank)).slots for rank in (64, 8))
    assert 1 < least < most


def test_the_page_is_what_the_command_gives() -> None:
    kept = PAGE.read_text().split(BEGIN)[1].split(END)[0]
    assert kept.strip() == written()


def config(place: Path, **fields: Any) -> str:
    path = place / "config.json"
    path.write_text(json.dumps(fields))
    return str(path)


def test_the_command_needs_a_config_json_and_nothing_beside(tmp_path: Path) -> None:
    wide = CliRunner(env={"COLUMNS": "200"})
    shown = wide.invoke(app, ["fits", config(tmp_path, **SHAPE_8B), "--card", "h100", "--card", "l4 "])
    assert shown.exit_code == 0, shown.output
    assert "llama, 8.03 billion parameters, 15.0 GiB in bfloat16, 128 KiB of keys and values a token" in shown.output
    assert all(card.name in shown.output for card in CARDS if card.name in ("H100 80 GB", "L4 24 GB"))
    assert "H200" not in shown.output.partition("An estimate")[0]
    large = config(tmp_path, **SHAPE_8B | {"num_hidden_layers": 400})
    assert CliRunner().invoke(app, ["fits", large, "--card", "L4 "]).exit_code == 1


@pytest.mark.parametrize(("shape", "name"), [("Llama 3.1 8B", "L4 "), ("Qwen3 30B-A3B", "A100 80")])
def test_every_way_is_shown_with_its_memory_in_a_hundred_columns(tmp_path: Path, shape: str, name: str) -> None:
    base = read(BASES[shape])
    (card,) = chosen([name])
    told = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, ["fits", config(tmp_path, **BASES[shape]), "--card", card.name]
    )
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in told.output.splitlines() if "│" in line]
    ways = fits(base, card, Work())
    assert [row[1] for row in rows[: len(ways)]] == [one.way for one in ways]
    assert ("8 bits" in told.output) == (not base.experts), "experts cannot stay packed"
    for row, one in zip(rows, ways, strict=False):
        assert row[2:5] == [f"{size / GIB:.1f}" for size in (one.weights, one.cache, one.passing)]
        assert one.cache == one.rows * (2048 * base.kv_bytes_per_token + base.state_bytes)
        assert one.weights + one.cache + one.passing <= card.memory or not one.fits
        assert row[5:] == ([str(one.slots), str(one.rows)] if one.fits else ["does not fit", ""])
    assert all(one.fits for one in ways) == bool(base.experts), "choose another card: the test shows too little"


def test_of_a_hub_id_only_the_configuration_is_asked_for(tmp_path: Path) -> None:
    there = {"config.json": json.dumps({**SHAPE_8B, "num_hidden_layers": 2}).encode(), "model.safetensors": b"x"}
    with HubServer(there) as hub:
        command = [sys.executable, "-m", "motet", "fits", "me/base", "--card", "l4 "]
        told = subprocess.run(command, env=environment(hub.url, tmp_path), capture_output=True, text=True, check=False)
        assert told.returncode == 0, told.stderr
        assert "me/base: llama" in told.stdout
        files = {one.rpartition("/")[2] for one in hub.asked if "/resolve/" in one}
        assert "config.json" in files
        assert not [one for one in files if not one.endswith(".json")], hub.asked


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_size": 64}, "cannot be read"),
        ({"model_type": "nothing_known"}, "cannot be read"),
        ({"model_type": "t5"}, "cannot be"),
        (SHAPE_8B | {"num_attention_heads": "many"}, "cannot be"),
        (SHAPE_8B | {"hidden_size": 0}, "cannot be"),
    ],
)
def test_a_configuration_that_is_none_is_told(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BaseModelError, match=words):
        outline(config(tmp_path, **fields))


@pytest.mark.parametrize("name", ["gemma4", "gemma3n", "lfm2", "bamba", "falcon_h1", "gpt_bigcode"])
def test_a_base_whose_caches_are_unknown_is_refused(name: str) -> None:
    with pytest.raises(BaseModelError, match=r"run `motet check`.*which measures it"):
        outline(str(tiny.directory(name)))


def test_a_card_that_is_unknown_and_more_tokens_than_positions_are_told() -> None:
    with pytest.raises(ConfigError, match=r"'H1000' is unknown;.*memory: L4 24 GB,"):
        chosen(["H1000"])
    shown = CliRunner().invoke(app, ["fits", "small", "--tokens", "2000"])
    assert isinstance(shown.exception, ConfigError)
    assert "--tokens 2000: small has positions for 1024 tokens; lower it" in str(shown.exception)
