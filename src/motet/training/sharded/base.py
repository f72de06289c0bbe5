"""A base on several ranks, as seen by their parent process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet.config import AdapterConfig
from motet.core.batch import LossFunctions
from motet.core.errors import BaseModelError
from motet.core.model_info import ModelInfo
from motet.model.load import load_tokenizer
from motet.model.lora_model import LoraModel
from motet.model.peft_io import examine
from motet.training.sharded import messages as m
from motet.training.sharded.group import RankGroup


@dataclass(frozen=True)
class ShardedBase:
    """The ranks of a base, and the facts that they report about it."""

    info: ModelInfo
    group: RankGroup
    here: LoraModel | None = None
    """The whole base, if this process samples too."""

    @classmethod
    def of(cls, group: RankGroup, *, trust_remote_code: bool) -> ShardedBase:
        """A base that this process does not load; its facts come from the ranks."""
        facts: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in group.joined[0].facts.items()
        }
        tokenizer = load_tokenizer(facts["name"], trust_remote_code=trust_remote_code)
        return cls(_with_memory_note(ModelInfo(tokenizer=tokenizer, **facts), group), group)

    @classmethod
    def beside(cls, base: LoraModel, group: RankGroup) -> ShardedBase:
        """A base that is also loaded here; its ranks report what can be trained.

        Raises:
            BaseModelError: the ranks compute different bits.
        """
        facts = group.joined[0].facts
        if facts["device"] == base.info.device and group.joined[0].fingerprint != base.fingerprint():
            instead = "set engine.kernels to torch"
            if base.has_experts and base.device.type != "cpu":  # only there do ranks compute experts in another way
                instead = "let servers sample (rollout.engine), or set engine.shard to 1"
            raise BaseModelError(
                f"the ranks of {base.info.name} compute different bits than the sampling process; {instead}"
            )
        info = replace(base.info, experts=tuple(facts["experts"]), experts_idle=facts["experts_idle"])
        return cls(_with_memory_note(info, group), group, base)

    @property
    def math(self) -> LossFunctions | None:
        """Math functions of the base in this process; None if it is not loaded here, or torch computes it."""
        return None if self.here is None else self.here.math

    def examine(self, directory: Path) -> AdapterConfig:
        """As `motet.model.peft_io.examine`; if the base is not loaded here, a rank examines it.

        Raises:
            AdapterError: no job could start from the adapter; the message says why.
        """
        if self.here is not None:
            return examine(self.here, directory)
        answer = self.group.ask({0: m.ExamineOnRank(str(directory.absolute()))})[0]
        assert isinstance(answer, m.ExaminedOnRank)
        return AdapterConfig.model_validate(answer.shape)


def _with_memory_note(info: ModelInfo, group: RankGroup) -> ModelInfo:
    share = max(rank.own_bytes for rank in group.joined) / 2**20
    return replace(
        info, notes=(*info.notes, f"trained over {group.n_ranks} processes, {share:.0f} MiB of the base in each")
    )
