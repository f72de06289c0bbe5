"""The head's products, and passes without gradients: what a trainer asks of the kernels for GPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

import tests.support.triton_on_cpu  # noqa: F401
from motet.algorithms.client import ClientLoss
from motet.core.batch import Batch, Loss, Segment
from motet.kernels.cuda.launches import count
from motet.kernels.cuda.products import Products, ProductWeight
from tests.support import cuda_bases as cuda
from tests.support import tiny_models as tiny
from tests.support.critics import critic_trainer, value_segment
from tests.support.segments import REINFORCE, gradient, make_samples, make_segment, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")  # numpy on Inf and NaN
LENGTHS = ((3, 5), (2, 4))


class Counted(Products):
    """Notes the rows of each product with the head."""

    def __init__(self, products: Products, head: ProductWeight) -> None:
        super().__init__(products.table)
        self.head = head
        self.rows: dict[str, list[int]] = {"logits": [], "slopes": []}

    def multiply(self, x_TK: Tensor, weight: ProductWeight, y_TN: Tensor, adapters: Any = None) -> None:
        if weight is self.head:
            self.rows["logits"].append(len(x_TK))
        super().multiply(x_TK, weight, y_TN, adapters)

    def back(self, slope_TN: Tensor, weight: ProductWeight) -> Tensor:
        if weight is self.head:
            self.rows["slopes"].append(len(slope_TN))
        return super().back(slope_TN, weight)


def segment(name: str, loss: Loss) -> Segment:
    return replace(make_segment(name, loss), samples=make_samples(LENGTHS, seed=ord(name)))


def test_trained_rows_pass_the_head_once_each_way_whatever_weighs_them() -> None:
    """A slope by PPO depends on the logprob: it is a factor of each row, behind the product. Of two adapters at once."""
    base = cuda.load("llama_long")
    own = cuda.own(base)
    own.products = counted = Counted(own.products, own.plan.head)
    batch = Batch((segment("a", REINFORCE), segment("c", ClientLoss.of("ppo", None))))
    ours, stock = make_trainer(base, "ac"), make_trainer(tiny.base("llama_long"), "ac")
    for trainer in (ours, stock):
        trainer.forward_backward(batch)
    assert counted.rows == {"logits": [18], "slopes": [18]}
    ours.forward(batch)
    assert counted.rows == {"logits": [18, 18], "slopes": [18]}
    for name in "ac":
        found, wanted = gradient(ours, name).cpu(), gradient(stock, name)
        assert float((found - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max()) > 0


@pytest.mark.soak
def test_references_and_critics_are_computed_by_the_launches_of_the_policy() -> None:
    """A reference without those of adapters. A teacher is an adapter, whose pass is that of the policy."""
    base, each = cuda.base("llama_long"), list[Counter[str]]()
    policy, critic, batch = make_trainer(base, "c"), critic_trainer(base), Batch((segment("c", REINFORCE),))
    for trainer, given, reference in (
        (policy, batch, False), (policy, batch, True), (critic, Batch((value_segment(),)), False),
    ):  # fmt: skip
        with count() as launches:
            trainer.forward(given, base=reference)
        each.append(launches)
    own, of_base, of_critic = each
    layers = [name for name in own if name not in of_base]
    assert layers == ["add_adapters"]
    assert of_base == Counter({name: n for name, n in own.items() if name != "add_adapters"})
    assert {name: n for name, n in of_critic.items() if name in of_base or name == "add_adapters"} == of_critic
