"""Every limit has a row in docs/limits.toml, and the table that is made of them tells what is so."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import limits_page
from limits_page import Limit

ROWS = limits_page.limits()


def without(kind: str, name: str) -> list[Limit]:
    """The rows, of which none names this."""
    left = [{kind: tuple(one for one in getattr(row, kind) if one != name)} for row in ROWS]
    return [Limit(**{**vars(row), **changed}) for row, changed in zip(ROWS, left, strict=True)]


def test_routes_fields_settings_and_kinds_of_steps_have_a_row_and_rows_name_what_is_there() -> None:
    assert limits_page.gaps(ROWS) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("settings", "http.open_mb"),
        ("routes", "POST /v1/submissions"),
        ("routes", "POST /tinker/api/v1/asample"),
        ("fields", "Adam.grad_clip_norm"),
        ("fields", "FineTuningRequest.integrations[]"),
        ("steps", "reward judge"),
        ("steps", "algorithm kto"),
    ],
)
def test_what_has_no_row_is_named(kind: str, name: str) -> None:
    assert limits_page.gaps(without(kind, name)) == [f"{kind}: {name!r} has no row"]


def test_a_row_of_what_is_not_there_is_named() -> None:
    stale = replace(ROWS[0], routes=("GET /v1/gone",), fields=("Gone.*",))
    assert limits_page.gaps(
        [*ROWS[1:], replace(ROWS[0], routes=(), fields=()), replace(stale, settings=ROWS[0].settings)]
    ) == [
        "routes: a row names 'GET /v1/gone', which is not there",
        "fields: a row names 'Gone.*', which is not there",
    ]


def test_rows_name_who_pays_and_tests_that_are_there() -> None:
    assert [row.what for row in ROWS if row.pays not in limits_page.PAYERS] == []
    assert limits_page.missing_tests(ROWS) == []
    gone = replace(ROWS[0], tests=("service/test_gone.py::test_gone",))
    assert limits_page.missing_tests([gone, replace(gone, tests=())]) == [
        f"{gone.what}: no service/test_gone.py::test_gone",
        f"{gone.what}: no test",
    ]


def test_numbers_of_the_table_are_those_of_the_code() -> None:
    assert limits_page.shown("{service.http.bodies.MOST_PROMPT:MB}, {config.service.LimitsConfig.tokens_per_day}") == (
        "4 MB, 1,000,000,000"
    )
    assert limits_page.shown("{config.service.LimitsConfig.steps}") == "none"
    with pytest.raises(AttributeError):
        limits_page.shown("{service.http.bodies.NOWHERE}")


def test_what_a_schema_bounds_needs_no_row() -> None:
    """Of each kind of value one without a bound, and the same with it."""
    bounded: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0, "maximum": 9},
        {"type": "string", "maxLength": 9},
        {"type": "string", "pattern": r"^[a-z*+.-]{1,9}$"},
        {"type": "array", "maxItems": 9, "items": {"type": "boolean"}},
        {"type": "object", "maxProperties": 9},
        {"enum": ["a"]},
        {"anyOf": [{"type": "null"}, {"const": 1}]},
    ]
    open_ended: list[dict[str, Any]] = [
        {"type": "integer", "minimum": 0},
        {"type": "string"},
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "string", "pattern": "[a-z]{1,9}"},
        {"type": "array", "items": {"type": "boolean"}},
        {"type": "object"},
        {},
    ]
    assert [one for one in bounded if list(limits_page.unbounded(one, "x", {}))] == []
    assert [one for one in open_ended if list(limits_page.unbounded(one, "x", {})) != ["x"]] == []


def test_each_route_stands_in_the_table_with_the_most_of_its_body() -> None:
    page = limits_page.table()
    told = re.findall(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) [^`]+)` \| ([^|]+) \| ([^|]*) \|", page, re.M)
    assert {route for route, *_ in told} == limits_page.routes()
    bodies = {route: (body, values) for route, body, values in told}
    assert bodies["POST /v1/files"] == ("64 MB", "")
    assert bodies["POST /v1/keys"] == ("1 MB", "32,768")
    assert bodies["POST /tinker/api/v1/asample"][1] == "201,024"
    assert bodies["GET /v1/me"] == ("none", "")
