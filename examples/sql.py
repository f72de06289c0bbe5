"""Questions about a table, answered by one SQL query. `python sql.py > sql.jsonl` writes them."""

from __future__ import annotations

import contextlib
import json
import random
import sqlite3
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from motet import Problem

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo")
CITIES = ("Oslo", "Rome", "Lima", "Cairo")
QUESTIONS = (
    ("How many people live in {city}?", "SELECT COUNT(*) FROM people WHERE city = '{city}'"),
    ("Who lives in {city}?", "SELECT name FROM people WHERE city = '{city}'"),
    ("Who is older than {age}?", "SELECT name FROM people WHERE age > {age}"),
    ("How many people are younger than {age}?", "SELECT COUNT(*) FROM people WHERE age < {age}"),
    ("How old is {name}?", "SELECT age FROM people WHERE name = '{name}'"),
    ("What is the mean age in {city}?", "SELECT AVG(age) FROM people WHERE city = '{city}'"),
    ("How old is the oldest person in {city}?", "SELECT MAX(age) FROM people WHERE city = '{city}'"),
)
READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ}
FUNCTIONS = {"avg", "count", "max", "min", "sum"}


def only_reads(action: int, _: str | None, name: str | None, *more: object) -> int:
    """A query may read and call `FUNCTIONS`, but neither write nor open a file."""
    allowed = action in READS or (action == sqlite3.SQLITE_FUNCTION and name in FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def found(query: str, people: list[list[object]]) -> list[tuple[object, ...]]:
    """The rows of a query's answer, sorted.

    Raises:
        sqlite3.Error, ValueError: it is not one query that reads, or it takes more than a million steps.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as database:
        database.execute("CREATE TABLE people (name TEXT, city TEXT, age INTEGER)")
        database.executemany("INSERT INTO people VALUES (?, ?, ?)", people)
        database.set_authorizer(only_reads)
        database.set_progress_handler(lambda: 1, 10**6)
        cursor = database.execute(query)
        if cursor.description is None:
            raise ValueError("not a query")
        return sorted(cursor.fetchmany(100), key=repr)


def reward(problem: Problem, completion: str) -> float:
    """1 if the query finds the same rows as the reference, 0.1 if it finds others, else 0."""
    people = problem.metadata["people"]
    try:
        rows = found(completion, people)
    except (sqlite3.Error, sqlite3.Warning, ValueError):
        return 0.0
    if rows == found(problem.answer, people):
        return 1.0
    return 0.1 if rows else 0.0


def row(rng: random.Random) -> dict[str, object]:
    """A table of six people, a question, and the query that answers it."""
    people = [[name, rng.choice(CITIES), rng.randint(18, 80)] for name in rng.sample(NAMES, 6)]
    question, query = rng.choice(QUESTIONS)
    name, city, _ = rng.choice(people)
    values = {"name": name, "city": city, "age": rng.randint(20, 75)}
    prompt = f"Table people (name, city, age). {question.format(**values)} Write one SQL query."
    return {"prompt": prompt, "answer": query.format(**values), "people": people}


if __name__ == "__main__":
    numbers = random.Random(0)
    for _ in range(512):
        print(json.dumps(row(numbers)))
