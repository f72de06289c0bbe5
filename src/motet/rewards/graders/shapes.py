"""Graders in JSON, and their validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from motet.core.errors import GraderError
from motet.core.settings import Described, named
from motet.rewards.graders import formula, similarity, template

Text = Annotated[str, Field(max_length=100_000)]
_MOST_GRADERS = 32


class Shape(Described):
    """Base of all graders; unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field("", max_length=200)
    """The grader's name in responses."""

    def templates(self) -> Iterator[tuple[str, str]]:
        """(field, template) of each text that is filled in; by default, those of a comparison."""
        yield from ((field, getattr(self, field)) for field in ("input", "reference"))


class StringCheck(Shape):
    """1 or 0: `eq` and `ne` compare two texts, `like` and `ilike` look for the reference in the input."""

    type: Literal["string_check"]
    input: Text
    reference: Text
    operation: Literal["eq", "ne", "like", "ilike"]


class TextSimilarity(Shape):
    """How similar a text is to its reference, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Text
    reference: Text
    evaluation_metric: Literal[
        "cosine", "fuzzy_match", "bleu", "gleu", "meteor", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"
    ]  # fmt: skip


def _plain(content: Any) -> Any:
    """The text of a message's content, with text parts joined."""
    parts = content if isinstance(content, list) else [content]
    texts: list[Any] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text"):
            raise ValueError(f"{kind!r} is not supported: this base reads text")
        texts.append(part.get("text") if isinstance(part, Mapping) else part)
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


class JudgeMessage(BaseModel):
    """A message to a judge."""

    model_config = ConfigDict(extra="forbid")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_plain)]
    type: Literal["message"] | None = None


class JudgeSampling(Described):
    """Settings for a judge's answer."""

    model_config = ConfigDict(extra="forbid")
    max_tokens: int | None = Field(
        None, ge=1, le=100_000,
        validation_alias=AliasChoices("max_completions_tokens", "max_completion_tokens", "max_tokens"),
    )  # fmt: skip
    """512 unless set. The `openai` package calls it `max_completions_tokens`."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 unless set, so that equal answers get equal scores."""
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)


def _as_message(given: Any) -> Any:
    """Accept a plain text as one user message."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


Input = Annotated[list[JudgeMessage], Field(min_length=1, max_length=100), BeforeValidator(_as_message)]


class Judge(Shape):
    """Base of graders that ask a model."""

    model: str = Field(max_length=300)
    """The base, or a version of an adapter, named as in chat completions."""
    input: Input
    sampling_params: JudgeSampling | None = None

    def templates(self) -> Iterator[tuple[str, str]]:
        """(field, template) of each text that is filled in."""
        yield from ((f"input.{index}.content", message.content) for index, message in enumerate(self.input))


class ScoreModel(Judge):
    """A score from a model, within a range."""

    type: Literal["score_model"]
    range: tuple[float, float] = (0.0, 1.0)

    @model_validator(mode="after")
    def _rises(self) -> ScoreModel:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: {list(self.range)} must go from a smaller to a larger number")
        return self


class LabelModel(Judge):
    """1 if a model answers with a passing label, else 0."""

    type: Literal["label_model"]
    labels: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(min_length=1, max_length=100)
    passing_labels: list[str]

    @model_validator(mode="after")
    def _are_labels(self) -> LabelModel:
        if extra := set(self.passing_labels) - set(self.labels):
            raise ValueError(f"passing_labels: {min(extra)!r} is not among labels")
        return self


_ANSWERED = "Conversation, as JSON:\n{{item.messages}}\n\nAnswer to judge:\n{{sample.output_text}}"
_ASKED = "Conversation, as JSON:\n{{item.messages}}\n\nJudge how well each of these answers continues it."


class Criterion(Described):
    """One criterion of a rubric. A plain string is the text."""

    model_config = ConfigDict(extra="forbid")
    text: str = Field(min_length=1, max_length=10_000)
    """What the judge looks for."""
    weight: float = Field(1.0, ge=-1e6, le=1e6, allow_inf_nan=False)
    """Weight in the score, relative to the other criteria; a negative one takes points off."""


class Rubric(Judge):
    """Several scores from one answer of a model; the result is their weighted mean."""

    type: Literal["rubric"]
    criteria: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,60}$")],
        Annotated[Criterion, named("text")],
    ] = Field(min_length=1, max_length=_MOST_GRADERS)
    input: Input = [JudgeMessage(role="user", content=_ANSWERED)]
    range: tuple[float, float] = (0.0, 1.0)

    @model_validator(mode="after")
    def _can_be_weighed(self) -> Rubric:
        if not self.range[0] < self.range[1]:
            raise ValueError(f"range: {list(self.range)} must go from a smaller to a larger number")
        if not any(one.weight for one in self.criteria.values()):
            raise ValueError("criteria: every weight is 0; give one of them another")
        return self


class Rank(Judge):
    """All answers to a problem, ordered by a model in one question: 1 for the best, 0 for the worst."""

    type: Literal["rank"]
    input: Input = [JudgeMessage(role="user", content=_ASKED)]

    @model_validator(mode="after")
    def _names_no_answer(self) -> Rank:
        if any(name == "sample" for _, text in self.templates() for name, _ in template.variables(text)):
            raise ValueError("input: a rank grader shows all answers below the input; leave {{sample…}} out")
        return self


Single = StringCheck | TextSimilarity | ScoreModel | LabelModel | Rubric


class Multi(Shape):
    """Several graders and a formula over their scores."""

    type: Literal["multi"]
    graders: dict[str, Single] = Field(min_length=1, max_length=_MOST_GRADERS)
    calculate_output: str

    def templates(self) -> Iterator[tuple[str, str]]:
        """(field, template) of each text that is filled in."""
        for name, grader in self.graders.items():
            yield from ((f"graders.{name}.{field}", text) for field, text in grader.templates())


Grader = Single | Rank | Multi
KINDS: Mapping[str, type[StringCheck | TextSimilarity | ScoreModel | LabelModel | Rubric | Rank | Multi]] = {
    "string_check": StringCheck,
    "text_similarity": TextSimilarity,
    "score_model": ScoreModel,
    "label_model": LabelModel,
    "rubric": Rubric,
    "rank": Rank,
    "multi": Multi,
}
_PYTHON = (
    "a Python grader is not supported: code does not run on the server, which has no sandbox for it. Use string_check, "
    "text_similarity, score_model or multi, or a reward of your own with `motet run`"
)


def parse(value: Any, where: str = "grader") -> Grader:
    """Parse and check a grader in JSON; `where` is its name in messages.

    Raises GraderError, with the field and the reason, if it is invalid or not supported here.
    """
    if not isinstance(value, Mapping):
        raise GraderError(where, f"a grader is an object with a `type`, got {type(value).__name__}")
    kind = value.get("type")
    if kind == "python":
        raise GraderError(f"{where}.type", _PYTHON)
    if not isinstance(kind, str) or kind not in KINDS:
        raise GraderError(f"{where}.type", f"{kind!r:.80} is not a type of grader: there are {', '.join(KINDS)}")
    tree = dict(value)
    if kind == "multi":
        tree["graders"] = _below(tree.get("graders"), f"{where}.graders")
    try:
        grader: Grader = KINDS[kind].model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        field_path, message = ".".join([where, *map(str, first["loc"])]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "this field is not supported"
        raise GraderError(field_path, message) from error
    _check(grader, where)
    return grader


def _below(graders: Any, where: str) -> Any:
    if isinstance(graders, Mapping) and isinstance(graders.get("type"), str):  # one grader, as in the package's types
        graders = {str(graders.get("name", "grader")): graders}
    if not isinstance(graders, Mapping):
        raise GraderError(where, "this is a mapping of names to graders")
    for name, grader in graders.items():
        if isinstance(grader, Mapping) and grader.get("type") in ("multi", "rank"):
            raise GraderError(f"{where}.{name}", "a multi grader cannot contain another, or a rank grader")
    return {str(name): parse(grader, f"{where}.{name}") for name, grader in graders.items()}


def _check(grader: Grader, where: str) -> None:
    """Checks beyond pydantic's: metrics, formulas and variables."""
    field_path, n_variables = where, 0
    try:
        if isinstance(grader, TextSimilarity):
            field_path = f"{where}.evaluation_metric"
            similarity.check_metric(grader.evaluation_metric)
        if isinstance(grader, Multi):
            field_path = f"{where}.calculate_output"
            formula.parse(grader.calculate_output, grader.graders)
        for field, text in grader.templates():
            field_path = f"{where}.{field}"
            n_variables += len(template.variables(text))
            if n_variables > template.MOST_VARIABLES:
                raise ValueError(f"the grader has more than {template.MOST_VARIABLES} variables; leave some out")
    except ValueError as error:
        raise GraderError(field_path, str(error)) from error


def judges(grader: Grader) -> list[Judge]:
    """The parts of a grader that ask a model."""
    parts = grader.graders.values() if isinstance(grader, Multi) else [grader]
    return [part for part in parts if isinstance(part, Judge)]


def columns(grader: Grader) -> set[str]:
    """Columns of a row that a grader reads."""
    paths = [path for _, text in grader.templates() for path in template.variables(text)]
    return {str(path[0]) for namespace, path in paths if namespace == "item"}
