"""The process of one rank: joins the others, loads its part of the base, and answers the trainer's messages.

The parent is `motet.training.sharded.group`. The process exits when its input ends, as it does when the parent dies.
"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import distributed
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.registry import Choice
from motet.config import AdapterConfig
from motet.core.batch import Batch, Loss
from motet.core.errors import MotetError
from motet.kernels.supported_bases import load_as_configured
from motet.model import lean_import
from motet.model.accelerator import place_of, take, wait_for
from motet.model.experts import NEED_OWN_SAMPLING
from motet.model.peft_io import examine
from motet.model.shards import Shards, own_bytes
from motet.process.allocator import give_back_freed_memory
from motet.process.channel import Parent
from motet.training.sharded import messages as m
from motet.training.sharded.rank_trainer import InStep, RankTrainer
from motet.training.torch_trainer import TorchTrainer

_ALGORITHM: TypeAdapter[Algorithm] = TypeAdapter(Choice)
_PATIENCE = timedelta(days=7)
"""Time limit between ranks; the parent detects a missing rank."""


def join(message: m.Join) -> RankTrainer:
    """Connect to the other ranks and load this rank's part.

    Raises:
        BaseModelError: the base cannot be used.
    """
    engine = message.config
    torch.set_num_threads(engine.threads)
    place = place_of(engine.device, int(os.environ["LOCAL_RANK"]) if message.of_torchrun else message.rank)
    distributed.init_process_group(
        take(place),
        store=_store(message, engine.n_ranks),
        rank=message.rank,
        world_size=engine.n_ranks,
        timeout=_PATIENCE,
    )
    shards = None
    if engine.shard > 1:
        copies = init_device_mesh(
            place.type, (engine.n_ranks // engine.shard, engine.shard), mesh_dim_names=("copy", "part")
        )
        shards = Shards(copies["part"])
    # unpacked by default: free memory may differ between ranks
    form = "packed" if engine.base_format == "packed" else "unpacked"
    own = engine.model_copy(update={"device": str(place), "base_format": form})
    base = load_as_configured(message.base, own, message.own, shards=shards)
    if base.info.experts and not message.embedded:
        base.revise(experts=(), experts_idle=NEED_OWN_SAMPLING)
    if base.kernels is not None:
        base.kernels.prepare(0)
    return RankTrainer(base, TorchTrainer.of(base, engine))


def _store(message: m.Join, n_ranks: int) -> FileStore | TCPStore:
    """The rendezvous store. `init_method` is not used, because torchrun redirects it to its own store."""
    host, _, port = message.meeting.rpartition(":")
    if host:
        return TCPStore(host, int(port), n_ranks, is_master=message.rank == 0)
    return FileStore(message.meeting, n_ranks)


def joined(trainer: RankTrainer) -> m.Joined:
    """Facts about the base and this rank."""
    info = trainer.base.info
    facts = asdict(replace(info, tokenizer=None))  # type: ignore[arg-type]
    del facts["tokenizer"]
    return m.Joined(facts, trainer.base.fingerprint(), own_bytes(trainer.base.model))


def answer(trainer: RankTrainer, message: m.ToRank) -> m.FromRank:
    """Execute one message. An exception from this function means that the rank is out of step with the others."""
    try:
        return _answer(trainer, message)
    except InStep as error:
        wait_for(trainer.base.device)  # raises if the device can do no more work
        return _refused(error.__cause__)


def _answer(trainer: RankTrainer, message: m.ToRank) -> m.FromRank:
    match message:
        case m.AddAdapter():
            shape = AdapterConfig.model_validate(message.shape)
            trainer.add_adapter(message.name, shape, message.seed, message.owner, head=message.head)
        case m.RemoveAdapter():
            trainer.remove_adapter(message.name)
        case m.Train():
            places = [part.place for part in message.parts]
            trained = trainer.train(_batch(message.parts), places, message.route, message.n_tokens)
            pairs = zip(places, trained, strict=True)
            return m.RankResult(tuple(m.SegmentResult(place, result.logprobs, result.stats) for place, result in pairs))
        case m.Forward():
            scored = trainer.score(_batch(message.parts), message.route, base=message.base)
            return m.RankResult(
                tuple(m.SegmentResult(part.place, values) for part, values in zip(message.parts, scored, strict=True))
            )
        case m.RankStep():
            stats = trainer.step(message.name, message.optimizer)
            return m.RankDone() if stats is None else m.Stepped(stats)
        case m.SaveAdapter():
            try:
                trainer.save(
                    message.name, Path(message.directory), optimizer=message.optimizer, gradient=message.gradient
                )
            except (OSError, MotetError) as error:  # a full disk affects only this job
                return _refused(error)
        case m.ExamineOnRank():
            try:
                shape = examine(trainer.base, Path(message.directory))
            except Exception as error:  # the files are untrusted, and no other rank takes part
                return _refused(error)
            return m.ExaminedOnRank(shape.model_dump(mode="json"))
        case m.ReadAdapter():
            trainer.read(message.name, Path(message.directory), optimizer=message.optimizer)
    return m.RankDone()


def _batch(parts: tuple[m.RankSegment, ...]) -> Batch:
    return Batch(tuple(replace(part.segment, loss=_loss(part.loss)) for part in parts))


def _loss(loss: m.RankLoss | None) -> Loss | None:
    if loss is None:
        return None
    return loss.value or loss.client or _ALGORITHM.validate_python(loss.algorithm)


def _refused(error: BaseException | None) -> m.RankRefused:
    if error is None:
        return m.RankRefused("", "another rank refused it")
    if isinstance(error, OSError):
        path = None if error.filename is None else str(error.filename)
        return m.RankRefused("OSError", error.strerror or str(error), error.errno or 0, path)
    return m.RankRefused(type(error).__name__, str(error))


def serve(parent: Parent[m.ToRank]) -> None:
    """Serve as a rank until the parent is gone; the process ends with it."""
    give_back_freed_memory()
    lean_import.allow()
    parent.longest = None
    parent.on_hang_up(lambda: os._exit(1))  # at once: another process may already write to the same files
    first = parent.first()
    if not isinstance(first, m.Join):
        os._exit(int(first is None))
    try:
        trainer = join(first)
    except MotetError as error:
        parent.send(_refused(error))
        os._exit(1)  # the others wait for this rank
    parent.send(joined(trainer))
    while (message := parent.first()) is not None and not isinstance(message, m.Leave):
        parent.send(answer(trainer, message))
    os._exit(int(message is None))  # ranks leave a group one by one


if __name__ == "__main__":
    serve(Parent[m.ToRank](m.ToRank))
