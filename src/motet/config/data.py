"""The source of a job's problems."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from motet.core.settings import Config
from motet.core.suggestions import doubled_in

GENERATED_ROWS = 4096
"""Default number of rows of a generated source."""
HELD_OUT = 64
"""Default number of held-out rows."""
GIVEN_ROWS = "[rows]"
"""The source name for rows given as objects; no file, hub name or generated task has it."""
OF_CLIENT = "[client]"
"""The source name for jobs whose client sends the data: there are no rows."""


MOST_POOLS = 64
"""Values of a column with a weight, and changes of weights."""
_LEAST_SHARE = 0.001
_LONGEST_NAME = 500
_MOST_DOTS = 32


def column_name(name: str) -> str:
    """The name of a column, or a path into one. Raises ValueError if it is too long to be looked up in every row."""
    if len(name) > _LONGEST_NAME or name.count(".") > _MOST_DOTS:
        raise ValueError(
            f"the name of a column may have {_LONGEST_NAME} characters and {_MOST_DOTS} dots, this one has {len(name)} and "
            f"{name.count('.')}; name the column shorter"
        )
    return name


ColumnName = Annotated[str, AfterValidator(column_name)]
PartTag = Annotated[str, Field(min_length=2, max_length=100, pattern=r"^\S+$")]


def pool_of(value: Any) -> str:
    """The name of the pool of a column's value: the same for 1, 1.0 and "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _by_pool(weights: Any) -> Any:
    if not isinstance(weights, dict):
        return weights
    if doubled := doubled_in(map(pool_of, weights)):
        raise ValueError(f"several keys mean {doubled[0]!r:.80}, as 1, 1.0 and '1' do; give each value once")
    return {pool_of(value): weight for value, weight in weights.items()}


def _by_step(changes: Any) -> Any:
    if isinstance(changes, dict) and (doubled := doubled_in(str(step).strip().lstrip("0") for step in changes)):
        raise ValueError(f"several keys are step {doubled[0] or '0':.80}; give each step once")
    return changes


def _shares_that_can_be_kept(weights: dict[str, float]) -> dict[str, float]:
    given = [weight for weight in weights.values() if weight > 0]
    if not given:
        raise ValueError("give at least one weight above 0")
    if min(given) < _LEAST_SHARE * sum(given):
        raise ValueError(f"the smallest weight is less than {_LEAST_SHARE:.1%} of their sum; raise it, or leave it out")
    return weights


Weights = Annotated[
    dict[str, Annotated[float, Field(ge=0, le=10**6)]],
    Field(max_length=MOST_POOLS),
    BeforeValidator(_by_pool),
    AfterValidator(_shares_that_can_be_kept),
]


class PoolsConfig(Config):
    """How often rows with each value of a column, such as a difficulty, are trained on."""

    column: ColumnName
    """A column of the data."""
    weights: Weights
    """Relative weight of each value, as `{easy: 3, hard: 1}`. Rows with another value are left out."""
    changes: Annotated[
        dict[Annotated[int, Field(ge=1, le=10**9)], Weights], Field(max_length=MOST_POOLS), BeforeValidator(_by_step)
    ] = {}
    """Other weights from a step on, as `{100: {easy: 1, hard: 3}}`. A value that a change does not name has none."""

    @property
    def values(self) -> list[str]:
        """All values that ever have a weight, sorted, so that their order in the file changes no byte."""
        phases = [self.weights, *(self.changes[step] for step in sorted(self.changes))]
        return sorted({value for weights in phases for value, weight in weights.items() if weight > 0})


class DataConfig(Config):
    """Where problems come from. A plain string is the source."""

    source: str
    """`file.jsonl`, `file.csv`, `file.parquet`, `toy:NAME`, `reasoning-gym:NAME`, or a dataset for `datasets.load_dataset`
    (`hub/name`). From Python also the rows: a list of mappings, a `datasets.Dataset` or `IterableDataset`, a DataFrame or a
    table of pyarrow."""
    rows: Any = Field(None, exclude=True)
    """What was given as the source: see `data.tables`."""
    split: str = "train"
    """The split of a `datasets` source."""
    subset: str | None = None
    """The configuration name of a `datasets` source."""
    config: dict[str, Any] = {}
    """Options of a generated source; for reasoning-gym, those of the task."""
    size: int | None = Field(None, ge=1, le=10**9)
    """Number of rows that a generated source makes (4096 by default), or that `seed` draws from another source (all by
    default)."""
    prompt: ColumnName | None = None
    """Column with the prompt (text, or a list of messages), or the path to it in a column. By default a known column, such as
    prompt, question or messages."""
    answer: ColumnName | None = None
    """Column with the reference answer, or the path to it, such as `reward_model.ground_truth`. By default a known column,
    such as answer, solution or output."""
    template: str | None = None
    """Text with `{column}` or `{column.field}` fields from which the prompt is made."""
    max_prompt_tokens: int | None = Field(None, ge=1, le=10**7)
    """Leave out rows with a longer prompt. By default, a prompt that leaves no room for an answer is an error."""
    system: str | None = None
    """System prompt of every problem."""
    chat_template: bool = True
    """Set it to false to use the prompt without a chat template."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template, such as `enable_thinking: false`."""
    tool_format: (
        Literal[
            "hermes", "qwen3_coder", "glm", "llama3_json", "mistral", "deepseek_v3", "kimi_k2", "lfm2", "harmony", "none",
        ]
        | None
    ) = None  # fmt: skip
    """How the base writes tool calls ([Thoughts and calls](thoughts.md)). By default Motet finds it out from the chat
    template."""
    thoughts: tuple[PartTag, PartTag] | None = None
    """The tags around the base's thoughts, such as `["<think>", "</think>"]`. By default Motet finds them out from the chat
    template and the tokens."""
    special_tokens: bool = False
    """Read names of special tokens in the rows' prompts and answers as the tokens, as in prompts that are rendered already.
    Otherwise they are letters, as they always are in what models, tools and environments say."""
    shuffle: bool = True
    """Shuffle every pass over the data with the seed of the job."""
    order: ColumnName | None = None
    """Column by which every pass goes through the rows, smallest value first, such as a difficulty. It replaces
    `shuffle`."""
    pools: PoolsConfig | None = None
    """Groups of rows by a column, each with its share of every step. By default, all rows are one group."""
    holdout: Annotated[int, Field(ge=0, le=10**6)] | Literal["auto"] = "auto"
    """Rows to keep for evaluation. `auto` is 64, or a quarter of the rows if there are fewer than 256."""
    eval_source: str | None = None
    """Another source for evaluation, instead of held-out rows."""
    eval_split: str | None = None
    """The split of a `datasets` source to evaluate on: of `eval_source`, or else of `source`."""
    seed: int = 0
    """Seed of a generated source, and of what `size` and `holdout` draw. It is the same for every job, so sweeps share them."""

    def held_out_of(self, rows: int | None) -> int:
        """The number of rows to hold out of `rows`; None for a separate evaluation source."""
        if self.holdout != "auto":
            return self.holdout
        return HELD_OUT if rows is None else min(HELD_OUT, rows // 4)

    @model_validator(mode="before")
    @classmethod
    def _ordered_is_not_shuffled(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("order") is not None:
            if value.get("shuffle") is True:
                raise ValueError("order and shuffle: true do not go together; leave one out")
            return {**value, "shuffle": False}
        return value

    @model_validator(mode="before")
    @classmethod
    def _rows_for_a_source(cls, value: Any) -> Any:
        inside = isinstance(value, dict) and "source" in value
        given = value["source"] if inside else value
        if isinstance(given, dict) and given and all(hasattr(part, "with_format") for part in given.values()):
            raise ValueError("this is several tables; name one of its splits, such as data['train']")
        if (rows := _rows_of(given)) is not None:
            if inside and value.get("eval_split") is not None and value.get("eval_source") is None:
                raise ValueError("data.eval_split: given rows have no splits; leave it out, or name an eval_source")
            return {**(value if inside else {}), "source": GIVEN_ROWS, "rows": rows}
        if isinstance(value, dict) and value.get("rows") is not None and given != GIVEN_ROWS:
            raise ValueError("there is no field `rows`; give rows as the source")
        if inside and value.get("eval_split") is not None:
            return {"eval_source": given, **{name: part for name, part in value.items() if part is not None}}
        return value


def _rows_of(given: Any) -> Any:
    """Rows as they were given: a list, a table of `datasets`, pandas, polars or pyarrow; None for anything else."""
    tables = ("to_list", "with_format", "iterrows", "to_dicts", "to_pylist")
    return given if isinstance(given, list) or any(hasattr(given, method) for method in tables) else None
