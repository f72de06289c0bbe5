"""The base class of all sections of a job file."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ModelWrapValidatorHandler, model_validator

from motet.core.left import without_idle

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema


class Described(BaseModel):
    """A model whose fields are described by the docstrings below them.

    They are read only for a JSON schema: reading all of them would take a tenth of a service's start-up time.
    """

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in described(cls).items():
            alias = cls.model_fields[name].validation_alias
            key = alias if isinstance(alias, str) and alias in properties else name
            properties.get(key, {}).setdefault("description", text)
        return made


def described(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a model's fields."""
    texts: dict[str, str] = {}
    for above in reversed(model.__mro__):
        own = inspect.get_annotations(above)
        texts = {name: text for name, text in texts.items() if name not in own}
        if own and issubclass(above, Described):
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(above))).body
            texts |= _docstrings(tree)
    return {name: text for name, text in texts.items() if name in model.model_fields}


def _docstrings(tree: ast.stmt) -> dict[str, str]:
    found = {}
    assert isinstance(tree, ast.ClassDef)
    for field, text in pairwise(tree.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(said))):
                found[name] = inspect.cleandoc(said)
    return found


class Config(Described):
    """Unknown fields are errors, and values do not change after validation."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, defer_build=True, arbitrary_types_allowed=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _without_fields_that_left(cls, tree: Any) -> Any:
        return without_idle(cls.__name__, tree)


class Chosen(Config):
    """A section whose class its `type` names; the default class has no such field."""

    @classmethod
    def kinds(cls) -> Mapping[str, type[Self]]:
        """The classes by name."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_type(cls, tree: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(tree, dict) or "type" not in tree or "type" in cls.model_fields:
            return handler(tree)
        kinds = cls.kinds()
        if not isinstance(tree["type"], str) or (kind := kinds.get(tree["type"])) is None:
            raise ValueError(f"type must be {' or '.join(kinds)}, not {tree['type']!r:.80}")
        if kind is cls:
            return handler({name: value for name, value in tree.items() if name != "type"})
        return kind.model_validate(tree)


def named(key: str, kind: type = str) -> BeforeValidator:
    """Accept a plain value of a kind where a mapping is expected."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, kind) else value)
