"""All algorithms by name. A job names one, or its own class as `file.py:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.client import ClientDriven
from motet.algorithms.dapo import Dapo
from motet.algorithms.distillation import Distillation
from motet.algorithms.dpo import Dpo
from motet.algorithms.kto import Kto
from motet.algorithms.policy_gradient import PolicyGradient
from motet.algorithms.presets import Cispo, DrGrpo, Grpo, Gspo, ImportanceSampling, Ppo, Reinforce, Rloo
from motet.algorithms.supervised import SoftTargets, Supervised
from motet.core.errors import ConfigError
from motet.process.own_code import OwnCode

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "rloo": Rloo,
    "reinforce": Reinforce,
    "cispo": Cispo,
    "gspo": Gspo,
    "importance_sampling": ImportanceSampling,
    "ppo": Ppo,
    "distill": Distillation,
    "sft": Supervised,
    "soft_targets": SoftTargets,
    "dpo": Dpo,
    "kto": Kto,
    "client": ClientDriven,
}
"""The values of a job's `algorithm.type`."""
OWN = OwnCode("algorithm", ConfigError, tuple(ALGORITHMS))
_OWN = "own"


class _Choice:
    """Chooses the section's class by its type; pydantic adds the type to the paths of mistakes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        kinds: dict[Any, CoreSchema] = {name: handler.generate_schema(kind) for name, kind in ALGORITHMS.items()}
        own = core_schema.no_info_plain_validator_function(_own)
        written = core_schema.plain_serializer_function_ser_schema(_written, info_arg=True)
        return core_schema.tagged_union_schema({**kinds, _OWN: own}, discriminator=_kind, serialization=written)


Choice = Annotated[Algorithm, _Choice()]
"""The type of a job's field `algorithm`."""


def _kind(value: Any) -> str:
    name = value.type if isinstance(value, Algorithm) else value.get("type", "grpo") if isinstance(value, dict) else ""
    return name if isinstance(name, str) and name in ALGORITHMS else _OWN


def _written(value: Algorithm, info: core_schema.SerializationInfo) -> dict[str, Any]:
    """The fields of the section's class, and its type in any case."""
    return {"type": value.type, **value.model_dump(mode="json", exclude_unset=info.exclude_unset)}


def _own(value: Any) -> Algorithm:
    """A user's own algorithm, from its class."""
    if isinstance(value, Algorithm):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f"must be the name of an algorithm or a mapping of fields; there are {', '.join(ALGORITHMS)}")
    try:
        algorithm = OWN.find(value["type"])
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if not (isinstance(algorithm, type) and issubclass(algorithm, PolicyGradient)):
        raise ValueError(f"{value['type']} is no class that derives from motet.algorithms.PolicyGradient")
    try:
        made = algorithm.model_validate({name: field for name, field in value.items() if name != "type"})
        return made.model_copy(update={"type": value["type"]})
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise PydanticCustomError("own_algorithm", "{reasons}", {"reasons": reasons}) from error
