"""Adapters on the experts of a mixture: exact in company, gradients as autograd finds them, files as PEFT has them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from motet.commands.export import write
from motet.config import AdapterConfig, EngineConfig, JobConfig, RolloutConfig, RunConfig
from motet.core.batch import Batch
from motet.core.errors import AdapterError, BaseModelError
from motet.core.types import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from motet.hosts.launch import open_base
from motet.model.arithmetic import Arithmetic
from motet.model.expert_lora import ExpertProjection, ExpertShare, project, room
from motet.model.experts import rows_agree
from motet.model.lora import AdapterWeights, ExpertRun, make_layout
from motet.model.lora_model import LoraModel
from motet.model.peft_io import examine, file_views
from motet.model.routing import TrainerRouting, TrainSegment
from motet.runtime.rundir import RunDirectory
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.peft_files import close, export, load, peft_logits, randomise
from tests.support.segments import SHAPES, gradient, make_segment, plain_loss, run_steps, sampler_logprobs

# PEFT 0.21 asks transformers 5.23 for a property by its old name.
# Of what it brings together itself it looks for a rank that it has given to a parameter among modules.
pytestmark = [
    pytest.mark.tier1,  # fold
    pytest.mark.tier1,  # fold
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]
NAME = "qwen3_moe"
DTYPES = ("float32", "bfloat16")
TARGETS = {"a": ["all-linear", "experts"], "b": ["experts"], "c": ["q_proj", "experts.down_proj"]}
"""Of the jobs of `SHAPES`: both kinds of layers, experts alone, one projection of them."""


def make_trainer(base: LoraModel, names: str, *, recompute: bool = False) -> TorchTrainer:
    trainer = TorchTrainer(base, slots=8, kept_tokens=0 if recompute else None)
    for name in names:
        rank, alpha, _ = SHAPES[name]
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=alpha, target_modules=TARGETS[name]), seed=ord(name))
        masters = tiny.adapter_masters(base, rank=rank, targets=TARGETS[name], seed=ord(name))[1]
        inside.arena(trainer, name).set_masters(masters)
    return trainer


def adapters(base: LoraModel) -> list[AdapterWeights]:
    """Of two that share a layout, and of others."""
    kinds = [("a", 8), ("a", 8), ("b", 3), ("c", 1)]
    return [tiny.adapter(base, rank=rank, targets=TARGETS[name], seed=seed) for seed, (name, rank) in enumerate(kinds)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_company_alone_and_trained_have_the_same_bits(dtype: str) -> None:
    base = tiny.base(NAME, dtype)
    packed = [*zip(adapters(base), map(tiny.tokens, tiny.LENGTHS), strict=True), (None, tiny.tokens(30))]
    plain = tiny.packed_logits(base, [(None, ids) for _, ids in packed])
    together = tiny.packed_logits(base, packed)
    for (weights, ids), logits, without in zip(packed, together, plain, strict=True):
        assert torch.equal(tiny.packed_logits(base, [(weights, ids)])[0], logits)
        assert torch.equal(logits, without) == (weights is None), "base rows stay, adapted rows change"
        if weights is not None:
            segment = TrainSegment(0, len(ids) + -len(ids) % 4, weights, None)
            trained = TrainerRouting([segment], base.device, base.products, backward=False)
            assert torch.equal(tiny.packed_logits(base, [(weights, ids)], trained)[0], logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_rows_equal_read_ones(dtype: str) -> None:
    """A single row of each adapter, as in decoding: most experts have one row, many none."""
    base = tiny.base(NAME, dtype)
    firsts = [(weights, tiny.tokens(40, seed)[:1]) for seed, weights in enumerate(adapters(base))]
    together = tiny.packed_logits(base, [*firsts, (None, tiny.tokens(4))])
    for first, logits in zip(firsts, together, strict=False):
        assert torch.equal(
            tiny.packed_logits(base, [(first[0], torch.cat([first[1], tiny.tokens(36)]))])[0][:1], logits
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_steps_in_company_have_the_bytes_of_each_job_alone(dtype: str) -> None:
    base = tiny.base(NAME, dtype)
    trainer = make_trainer(base, "abc")
    together = run_steps(trainer, [Batch(tuple(make_segment(name) for name in "cab"))])
    for name, recompute in (("a", True), ("b", False)):
        alone = run_steps(make_trainer(base, name, recompute=recompute), [Batch((make_segment(name),))])
        assert alone[name] == together[name]
    segment = make_segment("b")
    (logprobs,) = trainer.forward(Batch((segment,)))[0]
    sampled = sampler_logprobs(base, trainer.weights("b"), segment.samples[0], segment.temperature)
    assert logprobs.tobytes() == sampled.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_adapter_are_padded_by_themselves(dtype: str) -> None:
    """To whole fours, and so many that even the smallest product is a matrix's."""
    layout = make_layout({}, 1, experts={"up": (2, 8, 6)})
    made = AdapterWeights.from_masters(layout, 1.0, torch.zeros(layout.size), getattr(torch, dtype))
    least = layout.least_expert_rows(made.flat.dtype)
    assert least * 6 > {"float32": 399, "bfloat16": 4096}[dtype]
    for n_rows in range(1, 9):
        assert room([ExpertRun(0, 9, made)], 0, n_rows, made.flat.dtype) == least
        assert room([ExpertRun(0, 9, made)], 1, n_rows, made.flat.dtype) == (4 if n_rows <= 4 else 8)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_gradients_are_those_of_autograd(rank: int, transposed: bool) -> None:
    """Two adapters and rows without one in the same expert, against plain PyTorch in double the precision."""
    n_experts, n_in, n_out, path = 3, 24, 40, "mlp.experts.up"
    layout = make_layout({}, rank, experts={path: (n_experts, n_in, n_out)})
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    masters = [random(layout.size) for _ in range(2)]
    made = [AdapterWeights.from_masters(layout, 2.0, flat, torch.float32) for flat in masters]
    sums = [torch.zeros(layout.size) for _ in masters]
    anchor = torch.zeros((), requires_grad=True)
    runs = [ExpertRun(0, 1, one, layout.matrices(sum_), 2.0, anchor) for one, sum_ in zip(made, sums, strict=True)]
    weight, bias = random(n_out, n_in), random(n_out)
    weights = torch.stack([weight.t().contiguous() if transposed else weight] * n_experts)
    projection = ExpertProjection(path, 1, weights, bias, transposed)
    rows, slope = random(28, n_in).requires_grad_(), random(28, n_out)
    shares = (ExpertShare(0, 0, 12), ExpertShare(1, 12, 16), ExpertShare(2, 16, 28))
    said = project(runs, projection, rows, shares)
    said.backward(slope)

    plain = rows.detach().double().requires_grad_()
    leaves = [[part[1].double().requires_grad_() for part in layout.views(flat)[path]] for flat in masters]
    expected = F.linear(plain, weight.double(), bias.double())
    parts = [2.0 * plain[span] @ a @ b for span, (a, b) in zip((slice(12), slice(12, 16)), leaves, strict=True)]
    expected = expected + torch.cat([*parts, torch.zeros(12, n_out, dtype=torch.float64)])
    expected.backward(slope.double())
    assert close(said.detach().double(), expected.detach(), 1e-5)
    assert close(grad_of(rows).double(), grad_of(plain), 1e-5)
    for flat, own in zip(sums, leaves, strict=True):
        for found, leaf in zip(layout.views(flat)[path], own, strict=True):
            assert close(found[1].double(), grad_of(leaf), 1e-5)
            assert not found[[0, 2]].any(), "other experts have no gradient"


def grad_of(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def test_gradients_of_a_step_are_those_of_peft(tmp_path: Path) -> None:
    """Through a whole model: PEFT's own adapters on parameters and autograd."""
    base, segment = tiny.base(NAME), make_segment("a")
    trainer = make_trainer(base, "ab")
    trainer.save_adapter("a", tmp_path, optimizer=False)
    model = PeftModel.from_pretrained(tiny.stock(NAME), tmp_path, is_trainable=True)
    plain_loss(model, segment).backward()
    trainer.forward_backward(Batch((make_segment("b"), segment)))
    layout = inside.arena(trainer, "a").layout
    assert len(layout.experts) == 4
    for name, (view, shape) in file_views(layout, gradient(trainer, "a")).items():
        want = model.get_parameter(name.replace(".weight", ".default.weight")).grad
        assert want is not None
        assert close(view.reshape(shape), want, 2e-5), name


@pytest.mark.parametrize(
    "targets", [["q_proj", "experts"], ["experts"], ["experts.down_proj"], ["layers.1.mlp.experts"]]
)
def test_peft_computes_what_was_exported(targets: list[str], tmp_path: Path) -> None:
    base, ids = tiny.base(NAME), tiny.tokens(23)
    weights = tiny.adapter(base, rank=3, targets=targets)
    export(tmp_path / "ours", base, weights, targets)
    peft = PeftModel.from_pretrained(tiny.stock(NAME), tmp_path / "ours")
    assert sum("lora_A" in name for name, _ in peft.named_parameters()) == len(weights.layout.paths)
    assert close(tiny.packed_logits(base, [(weights, ids)])[0], peft_logits(peft, ids), 1e-5)
    peft.save_pretrained(str(tmp_path / "theirs"))
    for directory in ("ours", "theirs"):
        assert torch.equal(load(tmp_path / directory, base).flat, weights.flat)


def test_what_peft_made_is_read(tmp_path: Path) -> None:
    base, ids = tiny.base(NAME), tiny.tokens(23)
    made = LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj"], target_parameters=["gate_up_proj", "down_proj"])
    peft = get_peft_model(tiny.stock(NAME), made)
    randomise(peft)
    peft.save_pretrained(str(tmp_path))
    assert close(tiny.packed_logits(base, [(load(tmp_path, base), ids)])[0], peft_logits(peft, ids), 1e-5)
    assert examine(base, tmp_path).target_modules == ["v_proj", "experts.down_proj", "experts.gate_up_proj"]
    config = json.loads((tmp_path / ADAPTER_CONFIG).read_text())
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({**config, "target_parameters": 5}))
    with pytest.raises(AdapterError, match="target_parameters=5 is no list of names"):
        examine(base, tmp_path)


@pytest.mark.parametrize("targets", [["q_proj", "experts"], ["experts.down_proj"], ["experts.gate_up_proj"]])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_one_by_one_are_the_same_adapter(name: str, targets: list[str], tmp_path: Path) -> None:
    """As vLLM loads them; what reads them again finds the bits that were there."""
    base, ids = tiny.base(name), tiny.tokens(23)
    weights = tiny.adapter(base, rank=3, targets=targets)
    export(tmp_path / "together", base, weights, targets)
    write(tmp_path / "together", None, tmp_path / "apart", "experts")
    logits = tiny.packed_logits(base, [(weights, ids)])[0]
    again = load(tmp_path / "apart", base)
    assert torch.equal(tiny.packed_logits(base, [(again, ids)])[0], logits)
    assert close(peft_logits(PeftModel.from_pretrained(tiny.stock(name), tmp_path / "apart"), ids), logits, 1e-5)
    place, *products = (
        ("mlp", "gate_proj", "up_proj", "down_proj") if name == NAME else ("block_sparse_moe", "w1", "w3", "w2")
    )
    names = {
        key.split(".layers.1.")[1] for key in load_file(tmp_path / "apart" / ADAPTER_WEIGHTS) if ".layers.1." in key
    }
    wanted = {
        f"{place}.experts.{number}.{product}.lora_{side}.weight"
        for number in range(16 if name == NAME else 4)
        for product in products
        for side in "AB"
    }
    assert wanted <= names
    assert {one for one in names - wanted if "experts" in one} == set()


def test_experts_one_by_one_whose_gate_and_up_share_nothing_get_twice_the_rank(tmp_path: Path) -> None:
    """As PEFT reads what was trained with experts that were modules of their own."""
    base, ids = tiny.base(NAME), tiny.tokens(23)
    export(tmp_path / "one", base, tiny.adapter(base, rank=3, targets=["q_proj", "experts"]), ["q_proj", "experts"])
    write(tmp_path / "one", None, tmp_path / "two", "experts")
    tensors = load_file(tmp_path / "two" / ADAPTER_WEIGHTS)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in tensors.items():
        if ".up_proj.lora_A" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    save_file(tensors, tmp_path / "two" / ADAPTER_WEIGHTS)
    found, peft = load(tmp_path / "two", base), PeftModel.from_pretrained(tiny.stock(NAME), tmp_path / "two")
    assert (found.layout.rank, examine(base, tmp_path / "two").alpha) == (6, 32.0)
    assert close(tiny.packed_logits(base, [(found, ids)])[0], peft_logits(peft, ids), 1e-5)
    assert examine(base, tmp_path / "two").target_modules == ["q_proj", "experts.down_proj", "experts.gate_up_proj"]


def test_experts_one_by_one_that_lack_something_are_refused(tmp_path: Path) -> None:
    base, whole = tiny.base(NAME), tmp_path / "whole"
    export(tmp_path / "one", base, tiny.adapter(base, rank=3, targets=["experts"]), ["experts"])
    write(tmp_path / "one", None, whole, "experts")
    tensors, module = load_file(whole / ADAPTER_WEIGHTS), "model.layers.0.mlp.experts"
    for gone, reason in (
        (".layers.0.mlp.experts.3.down_proj.lora_B", f"{module} do not all have an adapter of one shape on down_proj"),
        (".layers.0.mlp.experts.15.down_proj", "experts.lora_A.weight has shape .*, the base needs"),
        (
            ".up_proj.",
            rf"{module} has adapters on down_proj, gate_proj; supported are gate_proj, up_proj, down_proj",
        ),
    ):
        save_file({key: each for key, each in tensors.items() if gone not in key}, whole / ADAPTER_WEIGHTS)
        with pytest.raises(AdapterError, match=reason):
            load(whole, base)
    save_file(
        {key: each[:, :2].contiguous() if "lora_B" in key else each[:2] for key, each in tensors.items()},
        whole / ADAPTER_WEIGHTS,
    )
    with pytest.raises(AdapterError, match="whose rank is not 3"):
        load(whole, base)
    flat = {key: each.flatten() for key, each in tensors.items()}
    narrow = {key: each[:, 1:].contiguous() if "up_proj.lora_A" in key else each for key, each in tensors.items()}
    for damaged in (flat, narrow):
        save_file(damaged, whole / ADAPTER_WEIGHTS)
        with pytest.raises(AdapterError, match=str(whole)):
            load(whole, base)
    export(tmp_path / "llama", tiny.base("llama"), tiny.adapter(tiny.base("llama")), "all-linear")
    with pytest.raises(BaseModelError, match=r"\(llama\) do not.*the adapter unchanged"):
        write(tmp_path / "llama", None, tmp_path / "no", "experts")
    export(tmp_path / "heads", base, tiny.adapter(base, targets=["q_proj"]), ["q_proj"])
    with pytest.raises(AdapterError, match="has no weights on experts"):
        write(tmp_path / "heads", None, tmp_path / "no", "experts")


def test_experts_are_adapted_where_they_are_asked_for() -> None:
    base = tiny.base(NAME)
    assert not base.adapter_layout("all-linear", 8).experts
    assert not base.adapter_layout(["o_proj"], 8).experts
    every = [place.path for place in base.adapter_layout(["all-linear", "experts"], 8).experts]
    assert every == [
        f"model.layers.{layer}.mlp.experts.{name}_proj" for layer in (0, 1) for name in ("gate_up", "down")
    ]
    shared = tiny.base("qwen2_moe").adapter_layout(["down_proj"], 8)
    assert not shared.experts
    assert shared.places
    with pytest.raises(AdapterError, match=r"'experts\.q'.*there are:.*v_proj,"):
        base.adapter_layout(["experts.q"], 8)
    with pytest.raises(AdapterError, match="it has no experts; leave it out"):
        tiny.base("llama").adapter_layout(["q_proj", "experts"], 8)
    with pytest.raises(AdapterError, match=r"its class computes.*way; leave it out"):
        tiny.base("llama4").adapter_layout(["all-linear", "experts"], 8)


@pytest.mark.parametrize("rank", [1, 5, 8])
def test_every_matrix_of_an_expert_is_aligned_and_none_overlaps(rank: int) -> None:
    layout = make_layout({"q": (6, 10)}, rank, experts={"up": (3, 6, 7), "down": (3, 7, 6)})
    flat = torch.zeros(layout.size)
    for path, pair in layout.views(flat).items():
        for part in pair:
            part += 1
            each = part if path != "q" else part[None]
            assert all(one.data_ptr() % 64 == flat.data_ptr() % 64 for one in each)
    assert set(flat.tolist()) <= {0.0, 1.0}
    assert flat.sum() == rank * (6 + 10 + 3 * (6 + 7) * 2)
    assert flat[: layout.size_a].sum() == rank * (6 + 3 * (6 + 7)), "every A comes before every B"


def test_a_base_that_servers_sample_has_no_adapters_on_experts(tmp_path: Path) -> None:
    config = RunConfig(
        base=str(tiny.directory(NAME)),
        engine=EngineConfig(dtype="float32", device="cpu", threads=1),
        rollout=RolloutConfig(engine="vllm", urls=["http://127.0.0.1:9"]),
        jobs=[JobConfig(name="job", data="toy:reverse", rewards=["exact"])],
    )
    with contextlib.closing(RunDirectory(tmp_path)) as directory, contextlib.ExitStack() as stack:
        info = open_base(config, directory, stack).info
    with pytest.raises(AdapterError, match=r"Motet samples.*embedded\); leave it out"):
        info.adapted(["all-linear", "experts"])


def test_long_sums_of_experts_are_multiplied_in_tiles() -> None:
    """In bfloat16, where units for matrices cut them by the number of rows: that of a tile is always the same."""
    base = tiny.base("qwen3_moe_wide", "bfloat16")
    assert base.info.exact, base.info.inexact
    trainer = make_trainer(base, "ab")
    together = run_steps(trainer, [Batch(tuple(make_segment(name) for name in "ba"))], steps=1)
    alone = run_steps(make_trainer(base, "a"), [Batch((make_segment("a"),))], steps=1)
    assert alone["a"] == together["a"]
    sizes: list[int] = []
    count = Arithmetic(tile=64, long_sum=256)
    projection = ExpertProjection("up", 1, torch.randn(2, 40, 300), torch.randn(40), False, count)
    with Products(sizes):
        projection.base(torch.randn(70, 300))
        projection.product(torch.randn(3, 300), torch.randn(300, 8))
    assert sizes == [64, 64, 64]


class Products(TorchDispatchMode):
    """Notes the rows of every product."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self._sizes = sizes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self._sizes.append(args[0].shape[0])
        return func(*args, **kwargs or {})


def test_a_mixture_whose_rows_depend_on_how_many_choose_an_expert_is_not_exact() -> None:
    """The rows of the proof may never do so: it makes them."""
    base = tiny.load(NAME)
    assert rows_agree(base.model, 128, None)
    experts = next(module for module in base.model.modules() if hasattr(module, "at"))
    stock = experts._apply_gate
    experts._apply_gate = lambda rows: stock(rows) * (1 + 1e-3 * (len(rows) > 8))
    assert not rows_agree(base.model, 128, None)
