"""Rows become problems; every bad row has an error that names file, row and columns; windows cover each pass once."""

from __future__ import annotations

import codecs
import csv
import itertools
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from motet.config import DataConfig, JobConfig
from motet.core import seeds
from motet.core.errors import DataError
from motet.core.plain_json import as_json
from motet.core.types import Message, Problem
from motet.data.dataset import Dataset, load_dataset
from motet.data.problems import Problems
from motet.data.reasoning import ScorerSpec, build_scorer, first_seed, make_entries
from motet.data.row_files import OF_A_JOB

NONE = Problems.of(())
PROBLEMS = [Problem(i, (Message("user", f"question {i}"),), str(i)) for i in range(40)]


def write(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


@pytest.fixture
def rows():
    return [{"question": f"q{i}", "answer": i, "level": "easy"} for i in range(20)]


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 12), st.integers(0, 2**48), st.booleans())
@settings(max_examples=60, deadline=None)
def test_windows_cover_every_pass_exactly_once(n, width, steps, seed, shuffle):
    data = Dataset(Problems.of(PROBLEMS[:n]), NONE, None, shuffle=shuffle)
    sequence = [p.id for s in range(steps) for p in data.window(s * width, width, seed, width)]
    assert len(sequence) == steps * width
    for start in range(0, len(sequence) - n + 1, n):
        assert Counter(sequence[start : start + n]) == Counter(range(n))


def test_windows_are_shuffled_anew_and_depend_on_the_seed_alone():
    def window(step, seed=7, shuffle=True):
        return [
            p.id for p in Dataset(Problems.of(PROBLEMS), NONE, None, shuffle=shuffle).window(40 * step, 40, seed, 40)
        ]

    assert window(0) != window(1)
    assert window(0) == window(0)
    assert window(0) != window(0, seed=8)
    assert window(0, shuffle=False) == list(range(40))
    with pytest.raises(ValueError, match="no window"):
        Dataset(NONE, NONE, None).window(0, 4, 0, 4)


def test_split_is_seeded_by_the_data_and_keeps_source_rows_as_ids(tmp_path, rows):
    source = write(tmp_path / "d.jsonl", rows)
    data = load_dataset(DataConfig(source=source, holdout=5))
    again = load_dataset(DataConfig(source=source, holdout=5))
    other = load_dataset(DataConfig(source=source, holdout=5, seed=1))
    assert data == again
    assert {p.id for p in data.holdout} != {p.id for p in other.holdout}
    assert sorted(p.id for p in (*data.train, *data.holdout)) == list(range(20))
    assert all(p.messages[0].content == f"q{p.id}" and p.answer == str(p.id) for p in data.train)
    assert data.train[0].metadata == {"answer": data.train[0].id, "level": "easy"}
    assert data.scorer is None


def test_a_held_out_prompt_is_never_trained_on(tmp_path):
    source = write(tmp_path / "d.jsonl", [{"prompt": f"q{i % 4}", "answer": ""} for i in range(40)])
    data = load_dataset(DataConfig(source=source, holdout=2))
    assert not {p.messages for p in data.holdout} & {p.messages for p in data.train}
    assert data.train


def test_what_is_left_out_of_training_is_told(tmp_path):
    source = write(tmp_path / "d.jsonl", [{"prompt": f"q{i % 20}", "answer": ""} for i in range(300)])
    data = load_dataset(DataConfig(source=source, holdout=6))
    held_out = {problem.messages for problem in data.holdout}
    left_out = 300 - 6 - len(data.train)
    assert left_out == 15 * len(held_out) - 6 > 0
    (note,) = data.notes
    assert note.startswith(
        f"{left_out} of 300 rows are left out of training, because their prompts are held out. Many rows"
    )
    (fewer,) = map(int, re.findall(r"set data\.holdout to (\d+) ", note))
    followed = load_dataset(DataConfig(source=source, holdout=fewer))
    assert len(data.train) < len(followed.train) >= 0.75 * 300, "the cure is one"
    assert "set data.holdout" not in "".join(load_dataset(DataConfig(source=source, holdout=1)).notes)
    assert load_dataset(DataConfig(source=source, holdout=0)).notes == ()


def test_rows_with_long_prompts_can_be_left_out_before_any_are_held_out(tmp_path, rows):
    long = [{"question": f"q{i} and more", "answer": ""} for i in range(7)]
    source = write(tmp_path / "d.jsonl", [*long, *rows])

    def longer(problem: Problem, most: int) -> bool:
        return len(problem.messages[0].content) > most

    data = load_dataset(DataConfig(source=source, holdout=5, max_prompt_tokens=4), longer=longer)
    assert sorted(problem.id for problem in (*data.train, *data.holdout)) == list(range(7, 27))
    assert data.notes == (
        "7 of 27 rows are left out, because their prompts have more than 4 tokens (data.max_prompt_tokens)",
    )
    whole = load_dataset(DataConfig(source=source, holdout=5, max_prompt_tokens=100), longer=longer)
    assert whole == load_dataset(DataConfig(source=source, holdout=5))
    with pytest.raises(DataError, match=r"27 rows.*raise data\.max_prompt_tokens"):
        load_dataset(DataConfig(source=source, max_prompt_tokens=1), longer=longer)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet", "csv", "directory", "saved", "list", "dataset"])
def test_formats_give_the_same_problems(tmp_path, rows, suffix):
    if suffix == "csv":  # which knows text alone
        rows = [{name: str(value) for name, value in row.items()} for row in rows]
    expected = load_dataset(DataConfig(source=write(tmp_path / "d.jsonl", rows), holdout=3)).train
    path = rows
    if suffix == "jsonl":
        path = tmp_path / "e.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + (tmp_path / "d.jsonl").read_bytes().replace(b"\n", b"\n\n"))
    elif suffix == "json":
        path = tmp_path / "e.json"
        path.write_text(json.dumps(rows))
    elif suffix == "parquet":
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / "e.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif suffix == "csv":
        path = tmp_path / "e.csv"
        with path.open("w", encoding="utf-8-sig", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
    elif suffix == "dataset":
        import datasets

        path = datasets.Dataset.from_list(rows)
    elif suffix != "list":
        import datasets

        path = tmp_path / "folder"
        if suffix == "saved":
            datasets.Dataset.from_list(rows).save_to_disk(str(path))
        else:
            path.mkdir()
            write(path / "train.jsonl", rows)
    source = str(path) if isinstance(path, Path) else path
    assert load_dataset(DataConfig(source=source, holdout=3)).train == expected
    if source is path:
        assert JobConfig.model_validate({"name": "a", "reward": "exact", "data": source}).data == DataConfig(
            source=source
        )


def test_csv_is_text_with_quotes_and_breaks(tmp_path):
    path = tmp_path / "d.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,answer,level\r\n"two\r\nlines, ""quoted""",007,\r\n\r\nx,y,z\r\n')
    first, second = load_dataset(DataConfig(source=str(path), holdout=0)).train
    assert (first.messages[0].content, first.answer, first.metadata["level"]) == ('two\r\nlines, "quoted"', "007", "")
    assert second.answer == "y"


def test_a_subset_of_a_directory_is_read_and_one_that_is_not_there_is_told(tmp_path):
    parts = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("easy", "hard"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{parts}---\n")
    for name in ("easy", "hard"):
        write(tmp_path / f"{name}.jsonl", [{"question": f"{name} {i}", "answer": i} for i in range(3)])

    def questions(subset):
        data = {"source": str(tmp_path), "subset": subset, "prompt": "question", "holdout": 0}
        return [one.messages[-1].content for one in load_dataset(DataConfig.model_validate(data)).train]

    assert questions("hard") == [f"hard {i}" for i in range(3)]
    assert questions("easy") == [f"easy {i}" for i in range(3)]
    with pytest.raises(DataError, match=r"subset 'harder'.*easy.*hard"):
        questions("harder")


def test_what_is_no_list_of_rows_is_told():
    import datasets

    table = datasets.Dataset.from_list([{"prompt": "x"}])
    with pytest.raises(ValidationError, match=r"name one of its splits,.*data\['train'\]"):
        DataConfig(source=datasets.DatasetDict({"train": table}))
    with pytest.raises(ValidationError, match="give rows as the source"):
        DataConfig(source="toy:add", rows=[{"prompt": "x"}])


def test_messages_template_and_system(tmp_path):
    chat = [{"role": "system", "content": "old"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    row = {"messages": [*chat, {"role": "assistant", "content": "hello"}], "topic": "x"}
    source = write(tmp_path / "d.jsonl", [row])
    (problem,) = load_dataset(DataConfig(source=source, holdout=0, system="new")).train
    assert problem.messages == (Message("system", "new"), Message("user", "hi"))
    assert (problem.answer, problem.conversational, problem.metadata) == ("hello", True, {"topic": "x"})
    (problem,) = load_dataset(DataConfig(source=source, holdout=0, template="About {topic}: {{}}")).train
    assert problem.messages == (Message("user", "About x: {}"),)
    assert not problem.conversational


def test_size_is_the_most_that_is_read(tmp_path, rows):
    assert len(load_dataset(DataConfig(source=write(tmp_path / "d.jsonl", rows), holdout=0, size=7)).train) == 7


def test_a_text_that_looks_like_messages_is_one_where_that_is_meant():
    for text in ('[{"role": "user", "content": "hi"}]', '[{"content": "hi"}]', '[{"name": "role"}]', "[1] {'role'}"):
        row = {"prompt": text, "completion": [{"role": "assistant", "content": text}]}
        config = DataConfig(source=[row], holdout=0, template="{prompt}" if '"role":' in text else None)
        assert load_dataset(config).train[0].messages[0].content == text


def test_a_file_may_begin_with_its_mark_and_empty_lines(tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_bytes(codecs.BOM_UTF8 + b'\r\n \r\n{"prompt": "x", "answer": "4"}\r\n\r\n')
    assert load_dataset(DataConfig(source=str(file), holdout=0)).train[0].answer == "4"


@pytest.mark.parametrize(
    ("n", "held_out"), [(1, 0), (3, 0), (4, 1), (40, 10), (64, 16), (255, 63), (256, 64), (1000, 64)]
)
def test_of_few_rows_a_quarter_is_held_out(n, held_out):
    rows = [{"prompt": str(i), "answer": "x"} for i in range(n)]
    data = load_dataset(DataConfig(source=rows))
    assert (len(data.holdout), len(data.train)) == (held_out, n - held_out)
    assert len(load_dataset(DataConfig(source=rows, eval_source="toy:add")).holdout) == 64


def test_tables_of_python_are_rows():
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    columns = {"prompt": ["a", "b", "c"], "answer": ["1", None, "3"]}
    frame = pandas.DataFrame({**columns, "level": [1.5, float("nan"), 2.0]})
    told = [{"answer": "1", "level": 1.5}, {"answer": None, "level": None}, {"answer": "3", "level": 2.0}]
    for value in (frame, {"source": frame}):
        assert [problem.metadata for problem in load_dataset(DataConfig.model_validate(value)).train] == told
    table = load_dataset(DataConfig.model_validate(pyarrow.table(columns)))
    assert [problem.answer for problem in table.train] == ["1", "", "3"]
    job = JobConfig.model_validate({"name": "a", "data": frame, "reward": "exact"})
    assert (job.data.source, len(job.data.rows)) == ("[rows]", 3)


def test_source_that_cannot_be_read_is_named_with_what_is_near(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "x"}])
    for folder in ("empty", "folder", "folder.jsonl"):
        (tmp_path / folder).mkdir()
    (tmp_path / "folder" / "rows.bin").write_text("no")
    write(tmp_path / "folder.jsonl" / "part.jsonl", [{"prompt": "x"}])
    for source, message in (
        (str(tmp_path / "folder"), r"holds no \.jsonl"),
        (str(tmp_path / "folder.jsonl"), r"is a directory .*name.*folder\.jsonl/part\.jsonl"),
        (str(tmp_path / "empty"), "is a directory that cannot be read"),
        (str(tmp_path / "trian.jsonl"), "did you mean 'train.jsonl'"),
        ("toy:ADD", "no toy task 'ADD'; did you mean 'add'"),
        ("toy:ad", "did you mean 'add'"),
        ("reasoning-gym:nosuch", r"no task 'nosuch'; (did you mean|the nearest names are) '?\w+"),
        ("reasoning-gym:chain_sums", "did you mean 'chain_sum'"),
    ):
        with pytest.raises(DataError, match=message):
            load_dataset(DataConfig(source=source, holdout=0, size=4))
    with pytest.raises(DataError, match=r"\{'foo': 1\}.*Its options:.*max_terms"):
        load_dataset(DataConfig(source="reasoning-gym:chain_sum", config={"foo": 1}))
    rows = str(tmp_path / "train.jsonl")
    given = DataConfig(source=[{"prompt": "x"}], holdout=0, split="a")
    of_file = DataConfig(source=rows, holdout=0, split="test")
    for whole, field in ((of_file, "split"), (DataConfig(source="toy:add", subset="main"), "subset"), (given, "split")):
        with pytest.raises(DataError, match=rf"data\.{field} '\w+': .* has no {field}s; leave it out"):
            load_dataset(whole)
    with pytest.raises(DataError, match=r"eval_source.*did you mean 'train\.jsonl'"):
        load_dataset(DataConfig(source="toy:add", eval_source=str(tmp_path / "trian.jsonl")))
    with pytest.raises(DataError, match=r"data\.holdout is 0"):
        load_dataset(DataConfig(source="toy:add", eval_source="toy:add", holdout=0))


def test_toy_rows_and_an_evaluation_source_of_its_own():
    data = load_dataset(DataConfig(source="toy:add", eval_source="toy:larger", size=30, holdout=8))
    assert len(data.train) == 30
    assert len(data.holdout) == 8
    assert {p.metadata["family"] for p in data.holdout} == {"larger"}


def test_another_split_of_the_source_is_for_evaluation(tmp_path):
    datasets = pytest.importorskip("datasets")
    parts = {
        part: [{"prompt": f"{part} {i}", "answer": "x"} for i in range(n)] for part, n in (("train", 9), ("test", 5))
    }
    made = {part: datasets.Dataset.from_list(rows) for part, rows in parts.items()}
    datasets.DatasetDict(made).save_to_disk(str(tmp_path / "exam"))
    for named in ({}, {"eval_source": str(tmp_path / "exam")}, {"eval_source": None}):
        data = load_dataset(DataConfig(source=str(tmp_path / "exam"), eval_split="test", **named))
        assert [problem.messages[0].content for problem in data.holdout] == [f"test {i}" for i in range(5)]
        assert len(data.train) == 9


def levels(data: Dataset, of: str = "train") -> Counter[str]:
    return Counter(problem.metadata["level"] for problem in getattr(data, of))


SORTED = [{"prompt": f"Level {n // 100}: {n}", "answer": str(n), "level": n // 100} for n in range(400)]


def sorted_rows(tmp_path: Path, form: str) -> Any:
    datasets = pytest.importorskip("datasets")
    if form == "rows":
        return SORTED
    path = tmp_path / f"sorted.{form}"
    if form == "saved":
        datasets.Dataset.from_list(SORTED).save_to_disk(str(path))
    elif form == "parquet":
        datasets.Dataset.from_list(SORTED).to_parquet(str(path))
    elif form == "csv":
        datasets.Dataset.from_list(SORTED).to_csv(str(path))
    elif form == "json":
        path.write_text(json.dumps(SORTED))
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in SORTED))
    return str(path)


@pytest.mark.parametrize("form", ["jsonl", "json", "csv", "parquet", "saved", "rows"])
def test_size_and_held_out_rows_are_drawn_by_the_seed(tmp_path: Path, form: str) -> None:
    source = sorted_rows(tmp_path, form)
    for bounds in (None, OF_A_JOB):
        data = load_dataset(DataConfig(source=source, size=80, holdout=0), bounds)
        assert len(levels(data)) == 4
        assert len(data.train) == 80
        assert [SORTED[problem.id]["answer"] for problem in data.train] == [problem.answer for problem in data.train]
        assert data.notes == ("80 of 400 rows are read, drawn by data.seed",)
        again, other = (
            load_dataset(DataConfig(source=source, size=80, holdout=0, seed=seed), bounds) for seed in (0, 1)
        )
        assert again.train == data.train != other.train
        if form != "rows":
            apart = load_dataset(DataConfig(source="toy:add", eval_source=source), bounds)
            assert len(levels(apart, "holdout")) == 4
            assert len(apart.holdout) == 64
            assert apart.notes == (f"{source}: 64 of 400 rows are read, drawn by data.seed",)
    whole = load_dataset(DataConfig(source=source, size=400, holdout=0))
    assert [problem.id for problem in whole.train] == list(range(400))
    assert whole.notes == ()


def test_a_smaller_size_takes_some_of_the_rows_of_a_larger_one(tmp_path: Path) -> None:
    few, more = (load_dataset(DataConfig(source=SORTED, size=size, holdout=0)).train for size in (20, 50))
    assert {problem.id for problem in few} < {problem.id for problem in more}


def test_rows_that_are_not_drawn_are_not_looked_at(tmp_path: Path) -> None:
    rows = [{"prompt": "x" if n else "", "answer": "y"} for n in range(4)]
    taken = [seed for seed in range(8) if seeds.permutation(seeds.key(seed, "size"), 4)[0]]
    assert len(taken) == 3
    for seed in taken:
        load_dataset(DataConfig(source=rows, size=1, holdout=0, seed=seed))
    for seed in {*range(8)} - {*taken}:
        with pytest.raises(DataError, match=r"row 1"):
            load_dataset(DataConfig(source=rows, size=1, holdout=0, seed=seed))


def test_a_stream_is_drawn_from_its_beginning() -> None:
    datasets = pytest.importorskip("datasets")
    read = Counter[int]()

    def rows(most: int) -> Any:
        for n in range(most):
            read[n] += 1
            yield {"prompt": f"Say {n}", "answer": str(n)}

    endless = datasets.IterableDataset.from_generator(rows, gen_kwargs={"most": 10**9})
    data = load_dataset(DataConfig(source=endless, size=100, holdout=0))
    assert max(read) < 10_001
    assert max(problem.id for problem in data.train) > 8000
    note = (
        "100 rows are read, drawn by data.seed from the first 10000 of a stream; mix the rows first if they are sorted"
    )
    assert data.notes == (note,)
    read.clear()
    assert len(load_dataset(DataConfig(source=endless, size=1200, holdout=0)).train) == 1200
    assert max(read) in (11_999, 12_000)
    short = datasets.IterableDataset.from_generator(rows, gen_kwargs={"most": 300})
    assert load_dataset(DataConfig(source=short, size=100, holdout=0)).notes == (
        "100 of 300 rows are read, drawn by data.seed",
    )
    assert len(load_dataset(DataConfig(source=short, size=500, holdout=0)).train) == 300


@pytest.mark.parametrize("bounds", [None, OF_A_JOB])
def test_more_rows_than_the_limit_are_drawn_from_the_first(tmp_path: Path, bounds: Any) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"prompt": "Say {n}", "answer": "{n}"}}\n' for n in range(OF_A_JOB.rows + 5)))
    data = load_dataset(DataConfig(source=str(path), size=1500, holdout=0), bounds)
    assert 14_000 < max(problem.id for problem in data.train) < 15_000
    assert data.notes[0].startswith(
        "1500 rows are read, drawn by data.seed from the first 15000 of more than 200000; mix"
    )
    if bounds is not None:
        with pytest.raises(DataError, match=r"more than 200000.*data.size to use fewer"):
            load_dataset(DataConfig(source=str(path)), bounds)


def test_seeds_of_reasoning_gym_have_no_rows_in_common() -> None:
    def asked(seed: int) -> set[str]:
        data = load_dataset(DataConfig(source="reasoning-gym:chain_sum", size=200, holdout=50, seed=seed))
        return {problem.messages[-1].content for problem in (*data.train, *data.holdout)}

    first, *others = [asked(seed) for seed in (0, 1, 2, -1)]
    assert all(len(rows & first) <= 2 for rows in others)
    assert first == {entry["question"] for entry in make_entries(ScorerSpec("chain_sum", size=200))}
    starts = sorted(map(first_seed, range(-1000, 1001)))
    assert starts[0] == first_seed(0) == 0
    assert min(b - a for a, b in itertools.pairwise(starts)) > 250_000
    assert starts[-1] + 10**9 < 2**32
    assert len(make_entries(ScorerSpec("pool_matrix", size=2, seed=first_seed(7)))) == 2


def test_reasoning_gym_scores_its_own_answers_in_training_and_evaluation():
    data = load_dataset(
        DataConfig(source="reasoning-gym:chain_sum", eval_source="reasoning-gym:leg_counting", size=12, holdout=2)
    )
    assert data.scorer is not None
    score = build_scorer(msgspec.convert(json.loads(json.dumps(asdict(data.scorer))), type(data.scorer)))
    for problem in (*data.train[:3], *data.holdout):
        assert score(problem, problem.answer) == 1.0
        assert score(problem, f"thinking <answer>no</answer> so <answer>{problem.answer}</answer>") == 1.0
        assert score(problem, "no") < 1.0


def test_values_become_json():
    import datetime

    import numpy as np

    value = {1: (np.int64(2), np.array([1.5])), "when": datetime.date(2024, 1, 2), "nan": float("nan"), "s": {"b", "a"}}
    assert as_json(value) == {"1": [2, [1.5]], "when": "2024-01-02", "nan": None, "s": ["a", "b"]}


def test_scorer_that_raises_on_an_answer_gives_it_nothing_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    data = load_dataset(DataConfig(source="reasoning-gym:prime_factorization", size=4, holdout=0))
    assert data.scorer is not None
    score, problem = build_scorer(data.scorer), data.train[0]
    assert [score(problem, text) for text in ("words", "none", problem.answer)] == [0, 0, 1]
    assert capsys.readouterr().out.count("the scorer of prime_factorization raised ValueError") == 1


def test_task_that_cannot_be_learned_is_named() -> None:
    assert load_dataset(DataConfig(source="reasoning-gym:chain_sum", size=4, holdout=0)).notes == ()
    (note,) = load_dataset(DataConfig(source="reasoning-gym:coin_flip", size=4, holdout=0)).notes
    assert note == (
        "reasoning-gym:coin_flip cannot be learned: a constant answer earns most rewards; take another task"
    )
