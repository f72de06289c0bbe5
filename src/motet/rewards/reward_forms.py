"""The forms that a reward function may have, told apart by the names of its parameters:

def score(problem, completion) -> float                        # ours, sync or async; in any order under these names
def score(problem, completion, thought, speech, calls) -> float   # with the parts of the answer that it names
def score(problem, completion, transcript) -> float            # with the whole conversation, a list of mappings
def score(problem, completions) -> list[float]                 # ours, all completions of a problem compared
def score(prompts, completions, **columns) -> list[float]      # TRL's, https://huggingface.co/docs/trl/rewards
def compute_score(data_source, solution_str, ground_truth, extra_info=None)    # verl's: a number or a mapping
def reward_func(queries, prompts, labels)                      # OpenRLHF's: a list, a tensor, or a mapping
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from motet.core.errors import RewardError
from motet.core.suggestions import close_matches
from motet.core.types import Problem
from motet.rewards.reward_answers import ANSWER_NAMED, Answer, Logs, TrainerState, ground_truth

Parameters = Mapping[str, inspect.Parameter]
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SEEN = ("transcript", "thought", "speech", "calls")
"""Parameters of our form that are filled in if a function has them."""
_TOKENS = ("completion_ids", "prompt_ids", "prompts_ids", "completion_mask", "prompt_mask")
_TRL_GIVEN = ("prompts", "completions", "trainer_state", "log_metric", "log_extra")
_VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
_VERL_BATCH = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_VERL_ONLY = ("reward_router_address", "reward_model_tokenizer", "reward_router", "tokenizer")
_OPENRLHF = ("queries", "prompts", "labels")
_NAME_ANSWER = "name the column with the reference answers in data.answer"
_OF_A_ROW = ("answer", "answers", "gold", "ground_truth", "label", "labels", "reference", "solution", "target", "truth")
"""Names that differ by row even where no column has them."""


@dataclass(frozen=True)
class Asked:
    """A call for answers to one problem."""

    problem: Problem
    answers: Sequence[Answer]
    state: TrainerState | None = None
    logs: Logs = field(default_factory=lambda: Logs(1))

    @property
    def texts(self) -> list[str]:
        """The answers as text."""
        return [one.text for one in self.answers]


Call = Callable[[Asked], Any]


@dataclass(frozen=True)
class LoadedReward:
    """A reward, ready to be called."""

    call: Call
    """Raw values, one per completion; for `async def` an awaitable of one value for one completion."""
    batched: bool
    """Takes all completions of a problem in one call."""
    is_async: bool
    sees_all: bool = False
    """Takes the transcript too."""
    compares: bool = False
    """Compares the completions of a problem, so it cannot be called for one alone."""
    reads_tokens: bool = False
    """Takes prompts and answers with their special tokens."""
    reads_state: bool = False
    """Takes `trainer_state`."""


def adapted(function: Any, args: Mapping[str, Any], name: str, columns: Collection[str] | None = None) -> LoadedReward:
    """A function with its arguments, ready to be called; `columns` are those of every row, if they are known.

    Raises RewardError if it is no function, its parameters fit no form, or it asks for what no row has.
    """
    if not callable(function):
        raise RewardError(f"reward {name!r} is {type(function).__name__}, not a function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = None  # written in C: its parameters are unknown
    called = function if inspect.isfunction(function) else getattr(function, "__call__", function)  # noqa: B004
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)
    if parameters is None:
        return LoadedReward(
            lambda asked: function(asked.problem, asked.answers[0].part("speech"), **args), False, is_async
        )
    if "environments" in parameters and parameters["environments"].default is inspect.Parameter.empty:
        raise RewardError(
            f"reward {name!r} takes environments, which are not where rewards run: leave it out. What the environment's "
            "get_reward() returns counts without a reward, and self.reward where it has neither that nor step"
        )
    known = None if columns is None else [column for column in columns if column != ANSWER_NAMED]
    made = _Function(function, parameters, dict(args), name, known, named=ANSWER_NAMED in (columns or ()))
    if "solution_str" in parameters or "solution_strs" in parameters:
        batched = "solution_strs" in parameters
        return LoadedReward(made.verl(_VERL_BATCH if batched else _VERL), batched, is_async)
    if "queries" in parameters and "completions" not in parameters:
        return LoadedReward(made.openrlhf(), True, is_async, reads_tokens=True)
    if list(parameters)[:2] == ["problem", "completions"] and not made.open_ended:
        return LoadedReward(made.compared(), True, is_async, compares=True)
    if "completions" in parameters:
        return LoadedReward(made.trl(), True, is_async, reads_state=made.names("trainer_state"))
    if made.names("trainer_state") and "trainer_state" not in args:
        raise RewardError(
            f"reward {name!r} takes trainer_state, which functions of TRL's form get, with completions; leave it out, or "
            "write def reward(completions, trainer_state, **kwargs)"
        )
    return LoadedReward(made.own(), False, is_async, "transcript" in parameters)


def own_parameters(parameters: Parameters) -> dict[str, inspect.Parameter]:
    """The parameters of a reward that a job's args may give: not those that every call fills in."""
    if "solution_str" in parameters or "solution_strs" in parameters:
        taken: Collection[str] = (*_VERL, *_VERL_BATCH)
    elif "queries" in parameters:
        taken = _OPENRLHF
    elif _by_name(parameters):
        taken = ("problem", "completion", *_SEEN)
    else:
        taken = (*tuple(parameters)[:2], *_SEEN)
    return {key: value for key, value in parameters.items() if key not in taken and value.kind not in _VARIADIC}


def _by_name(parameters: Parameters) -> bool:
    both = [parameters[key] for key in ("problem", "completion") if key in parameters]
    return len(both) == 2 and not any(one.kind is one.POSITIONAL_ONLY for one in both)


@dataclass(frozen=True)
class _Function:
    """A function whose form is known."""

    function: Any
    parameters: Parameters
    args: dict[str, Any]
    name: str
    columns: Collection[str] | None
    named: bool = False
    """Whether the job names the column with the answers."""

    @property
    def open_ended(self) -> bool:
        """Whether it takes any keyword."""
        return any(one.kind is one.VAR_KEYWORD for one in self.parameters.values())

    @property
    def required(self) -> list[str]:
        """Parameters without a default."""
        return [
            key
            for key, value in self.parameters.items()
            if value.default is value.empty and value.kind not in _VARIADIC
        ]

    def names(self, parameter: str) -> bool:
        """Whether it has a parameter, or its code names one that it takes with others."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return parameter in self.parameters or (self.open_ended and _names(code, parameter))

    def taken(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What it takes of what is there, and the job's args."""
        whole = {**given, **self.args}
        return {key: value for key, value in whole.items() if self.open_ended or key in self.parameters}

    def own(self) -> Call:
        """Pass problem and completion to the parameters of these names or, if one is missing, to the first two."""
        parameters, by_name = self.parameters, _by_name(self.parameters)
        positional = [key for key, value in parameters.items() if value.kind in _POSITIONAL]
        wrong = ""
        if positional[:1] == ["completion"] and not by_name:
            wrong = "completion first"
        elif positional[1:2] == ["problem"] and not by_name:
            wrong = "problem second"
        elif (
            len(positional) < 2
            and not by_name
            and not any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
        ):
            wrong = ", ".join(positional) or "nothing"
        if wrong:
            usual = "def reward(problem, completion), or TRL's def reward(completions, **columns)"
            raise RewardError(f"reward {self.name!r} takes {wrong}; write {usual}")
        self._check_args()
        seen = [key for key in _SEEN if key in parameters and key not in self.args]

        def call(asked: Asked) -> Any:
            (answer,) = asked.answers
            parts = {
                "transcript": answer.transcript,
                "thought": answer.part("thought"),
                "speech": answer.part("speech"),
            }
            parts["calls"] = answer.calls
            more = {**{key: parts[key] for key in seen}, **self.args}
            if by_name:
                return self.function(problem=asked.problem, completion=answer.text, **more)
            return self.function(asked.problem, answer.text, **more)

        return call

    def compared(self) -> Call:
        """Our form for all completions of a problem."""
        self._check_args()
        return lambda asked: self.function(asked.problem, asked.texts, **self.args)

    def trl(self) -> Call:
        """TRL's form: columns as lists, and what its trainer passes besides."""
        for tokens in (key for key in _TOKENS if key in self.required):
            raise RewardError(
                f"reward {self.name!r} requires {tokens}, and rewards get text, not tokens: leave the parameter out and "
                "measure the text, such as len(completion.split())"
            )
        wanted = [key for key in self.required if key not in (*_TRL_GIVEN, *self.args)]
        self._check_columns(wanted, "name the parameter as its column is named, or add the column to the data")

        def call(asked: Asked) -> Any:
            problem, n = asked.problem, len(asked.answers)
            given: dict[str, Any] = {column: [value] * n for column, value in problem.metadata.items()}
            given.setdefault("answer", [problem.answer] * n)
            if problem.conversational:
                prompt: Any = [{"role": message.role, "content": message.content} for message in problem.messages]
                given["completions"] = [[_message(answer)] for answer in asked.answers]
            else:
                prompt = "\n\n".join(message.content for message in problem.messages)
                given["completions"] = asked.texts
            given |= {"prompts": [prompt] * n, "trainer_state": asked.state}
            given |= {"log_metric": asked.logs.log_metric, "log_extra": asked.logs.log_extra}
            missing = set(self.required) - given.keys() - self.args.keys()
            if missing:
                raise TypeError(
                    f"it asks for the column {min(missing)!r}; the data's columns are {', '.join(problem.metadata)}"
                )
            return self.function(**self.taken(given))

        return call

    def verl(self, names: Sequence[str]) -> Call:
        """The form of verl, for one answer or for all; a mapping's other entries are logged."""
        source, solution, truth, info = names
        for key in (*_VERL, *_VERL_BATCH):
            if key in self.args and key != source:
                raise RewardError(f"reward {self.name!r}: each row has its own {key}: take it out of args")
        for key in (key for key in _VERL_ONLY if key in self.required and key not in self.args):
            raise RewardError(
                f"reward {self.name!r} requires {key}, which is a part of verl: leave the parameter out. To ask a model, take "
                "the reward `judge`"
            )
        taken = source in self.args and (self.open_ended or source in self.parameters)
        fixed = {"data_source": self.args.pop(source)} if taken else {}
        self._check_args(truth)
        if truth in self.required:
            self._check_columns(["ground_truth"], _NAME_ANSWER, "reward_model.ground_truth", "answer")
        if source in self.required and not fixed:
            self._check_columns(["data_source"], "add it to the data")

        def given(problem: Problem) -> dict[str, Any]:
            row = {**problem.metadata, **fixed}
            values = {
                source: row.get("data_source") or "",
                truth: ground_truth(problem, named=self.named),
                info: row.get("extra_info") or {},
            }
            return values if names is _VERL else {key: [value] for key, value in values.items()}

        def one(asked: Asked) -> Any:
            return self.function(**self.taken({**given(asked.problem), solution: asked.answers[0].text}))

        def every(asked: Asked) -> Any:
            n = len(asked.answers)
            columns = {key: value * n for key, value in given(asked.problem).items()}
            return self.function(**self.taken({**columns, solution: asked.texts}))

        return one if names is _VERL else every

    def openrlhf(self) -> Call:
        """OpenRLHF's form: texts with special tokens; `labels` has the answers of the rows."""
        if "labels" in self.args:
            raise RewardError(f"reward {self.name!r}: each row has its own labels: take them out of args")
        self._check_args("labels")
        if "labels" in self.required:
            self._check_columns(["labels"], _NAME_ANSWER, "label", "answer")

        def call(asked: Asked) -> Any:
            shown = [answer.shown for answer in asked.answers]
            row = asked.problem.metadata
            others = (row[name] for name in ("labels", "label") if row.get(name) is not None)
            labels = [asked.problem.answer or next(others, "")] * len(shown)
            whole = {
                "queries": [both for _, both in shown],
                "prompts": [prompt for prompt, _ in shown],
                "labels": labels,
            }
            return self.function(**self.taken(whole))

        return call

    def _check_columns(self, wanted: Sequence[str], hint: str, *others: str) -> None:
        """Refuse a parameter for which not every row has a column (or one of `others`), where the columns are known."""
        for key in wanted if self.columns is not None else ():
            if not {key, *others}.intersection(self.columns or ()):
                raise RewardError(
                    f"reward {self.name!r} asks for the column {key!r}, and not every row has one (columns of all rows: "
                    f"{', '.join(self.columns or ()) or 'none'}): {hint}"
                )

    def _check_args(self, truth: str = "") -> None:
        """Refuse args that are missing or unknown; `truth` is the parameter with the answers in a form without a problem."""
        own = own_parameters(self.parameters)
        missing = [key for key, value in own.items() if value.default is value.empty and key not in self.args]
        for key in missing:
            if key in (self.columns or ()) or key in _OF_A_ROW:
                raise RewardError(
                    f"reward {self.name!r} takes {key}, which differs by row: {self._instead(key, truth)}"
                )
        if missing:
            wanted = ", ".join(f"{key}: …" for key in missing)
            raise RewardError(
                f"reward {self.name!r} needs args that the job does not give: write {{name: {self.name}, args: {{{wanted}}}}}"
            )
        unknown = [key for key in self.args if key not in own and key not in _SEEN]
        if unknown and not self.open_ended:
            near = close_matches(unknown[0], own, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(own) or 'none'}"
            raise RewardError(f"reward {self.name!r} has no argument {unknown[0]!r}; {hint}")

    def _instead(self, key: str, truth: str) -> str:
        """What to write for a parameter that differs by row."""
        of_column = key in (self.columns or ()) and key != "answer"
        if not truth:
            inside = f"problem.metadata[{key!r}]" if of_column else "problem.answer"
            return f"leave the parameter out, and read {inside} in the function"
        if key not in _OF_A_ROW or (truth in self.parameters and of_column):
            return f"take TRL's form, def reward(completions, {key})"
        if truth in self.parameters:
            return f"leave the parameter out, and read {truth}, the reference answer"
        return f"call it {truth}" + (f", and set data.answer to {key}" if of_column else "")


def _names(code: Any, text: str) -> bool:
    """Whether code, or code within it, has a text as a constant."""
    return any(one == text or _names(one, text) for one in getattr(code, "co_consts", ()))


def _message(answer: Answer) -> dict[str, Any]:
    """An answer as TRL has it in conversations: it decodes all of one without calls, and parses one with calls."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.part("speech") if answer.calls else answer.text}
    if thought := answer.part("thought"):
        message["reasoning_content"] = thought
    if answer.calls:
        message["tool_calls"] = [{"type": "function", "function": call} for call in answer.calls]
    return message


def scored(values: Any, asked: Asked) -> list[Any] | None:
    """One raw score per answer, of what a function for several returned; None if it is no list of as many.

    Entries beside the scores are logged: of a mapping per answer (verl), or of one mapping of lists (OpenRLHF).
    """
    n = len(asked.answers)
    if isinstance(values, Mapping) and "rewards" in values:
        extra = values.get("extra_logs")
        for name, logged in (extra if isinstance(extra, Mapping) else {}).items():
            each = _listed(logged)
            for place in range(n):
                asked.logs.note(place, name, each[place] if each is not None and len(each) == n else logged)
        values = values["rewards"]
    each = _listed(values)
    if each is None or len(each) != n:
        return None
    return [alone(value, asked.logs, place) for place, value in enumerate(each)]


def alone(value: Any, logs: Logs, place: int) -> Any:
    """The raw score in what a function returned for one answer: of a mapping its `score`, and the rest is logged."""
    if not isinstance(value, Mapping) or "score" not in value:
        return value
    for name, entry in value.items():
        if name != "score":
            logs.note(place, name, entry)
    return value["score"]


def _listed(values: Any) -> list[Any] | None:
    """A list, tuple, array or tensor as a list; None for anything else."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        return None
    return list(values)
