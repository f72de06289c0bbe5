"""The page says where things are added: one of each is added so, in a copy of the package, and used.

An addition is new files and lines that are put into existing ones; it replaces no line, and takes two files at most.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]

ADDED: Mapping[str, tuple[Mapping[str, str], str, str, str]] = {
    # what is added: new files, and where a line goes: file, what stands there, what stands there then
    "An algorithm": (
        {
            "algorithms/halved.py": """
from typing import Literal
from motet.algorithms.presets import Grpo

class Halved(Grpo):
    type: Literal["halved"] = "halved"

    def token_losses(self, inputs):
        loss_N, clipped_N = super().token_losses(inputs)
        return 0.5 * loss_N, clipped_N
"""
        },
        "algorithms/registry.py",
        '    "grpo": Grpo,\n',
        '    "grpo": Grpo,\n    "halved": __import__("motet.algorithms.halved", fromlist=["Halved"]).Halved,\n',
    ),
    "A loop": (
        {
            "runtime/twice.py": """
from motet.runtime.rollout_loop import RolloutLoop

class Noted(RolloutLoop):
    async def step(self, step):
        await super().step(step)
        (self.job.directory.path / "noted").write_text(str(step))
"""
        },
        "runtime/running_job.py",
        "    match job.config.algorithm:\n",
        '    if job.config.algorithm.type == "halved":\n'
        '        return __import__("motet.runtime.twice", fromlist=["Noted"]).Noted\n'
        "    match job.config.algorithm:\n",
    ),
    "A trainer": (
        {
            "training/counting.py": """
class Counting:
    def __init__(self, inner):
        for name in ("add_adapter", "remove_adapter", "forward_backward", "forward", "save_adapter", "load_adapter"):
            setattr(self, name, getattr(inner, name))
        self._step = inner.optim_step

    def optim_step(self, name, optimizer):
        print(f"counted a step of {name}")
        return self._step(name, optimizer)
"""
        },
        "hosts/launch.py",
        "    check_directories(config)\n    return TorchTrainer.of(base, config)",
        "    if config.slots == 6:\n"
        '        return __import__("motet.training.counting", fromlist=["Counting"]).Counting(TorchTrainer.of(base, config))\n'
        "    check_directories(config)\n    return TorchTrainer.of(base, config)",
    ),
    "An optimizer": (
        {},
        "config/optimizers.py",
        "OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {\n",
        """@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    STATE = ("exp_avg",)
    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def step(self, number, masters, gradient, state):
        (mean,), (beta1, beta2) = state, self.betas
        direction = (mean * beta1 + gradient * (1 - beta1)).sign()
        return masters * (1 - self.lr * self.weight_decay) - direction * self.lr, mean * beta2 + gradient * (1 - beta2)


class LionConfig(OptimizerConfig):
    STEP = Lion
    type: Literal["lion"] = "lion"
    betas: tuple[float, float] = Lion.betas


OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "lion": LionConfig,
""",
    ),
    "A kind of LoRA": (
        {},
        "config/adapters.py",
        "ADAPTERS: Mapping[str, type[AdapterConfig]] = {\n",
        """import math
from typing import Literal

class RankStabilised(AdapterConfig):
    PEFT = {"use_rslora": True}
    type: Literal["rslora"] = "rslora"

    @staticmethod
    def scale_of(rank: int, alpha: float) -> float:
        return alpha / math.sqrt(rank)


ADAPTERS: Mapping[str, type[AdapterConfig]] = {
    "rslora": RankStabilised,
""",
    ),
    "A reward": (
        {},
        "rewards/rewards.py",
        "BUILTIN: Mapping[str, RewardFunction] = {\n",
        """def shouts(problem: Problem, completion: str) -> float:
    return float(completion.isupper()) + 0.5


BUILTIN: Mapping[str, RewardFunction] = {
    "shouts": shouts,
""",
    ),
    "A quantised format": (
        {
            "model/int8_rows.py": """
import torch

class Int8Rows:
    def tensors(self, n_out, n_in):
        return {"weight": ((n_out, n_in), torch.int8), "weight_scale": ((n_out, 1), torch.float32)}

    def numbers(self, tensors, rows):
        return tensors["weight"][rows].float() * tensors["weight_scale"][rows]

def int8(model, quantised):
    layers = (path for path, layer in model.named_modules() if isinstance(layer, torch.nn.Linear) and path != "lm_head")
    return dict.fromkeys(layers, Int8Rows())
"""
        },
        "model/checkpoint.py",
        '    "bitsandbytes": _nf4,\n',
        '    "bitsandbytes": _nf4,\n    "int8_rows": __import__("motet.model.int8_rows", fromlist=["int8"]).int8,\n',
    ),
    "A CUDA kernel": (
        {
            "kernels/cuda/kernels/halving.py": """
import triton.language as tl
from motet.kernels.cuda.kernels.compiling import kernel

@kernel("x")
def halve(x, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = places < n
    tl.store(x + places, tl.load(x + places, mask=live, other=0.0) / 2, mask=live)
"""
        },
        "kernels/cuda/forward.py",
        "def lanes(n: int) -> int:\n",
        "def halved(x):\n"
        '    halve = __import__("motet.kernels.cuda.kernels.halving", fromlist=["halve"]).halve\n'
        "    launch(halve, (triton.cdiv(len(x), 64),), x, len(x), BLOCK=64, **options(4))\n\n\n"
        "def lanes(n: int) -> int:\n",
    ),
    "A scheduler policy": (
        {
            "runtime/newest_first.py": """
from motet.runtime.scheduler import FairScheduler

class NewestFirst(FairScheduler):
    def job_order(self, account):
        print("ordered by the new policy")
        return super().job_order(account)

    def spend(self, job, tokens):
        print(f"charged {job}")
        super().spend(job, tokens)
"""
        },
        "hosts/host.py",
        "        scheduler = FairScheduler(workshop.engine.capacity * 3 // 2)\n",
        "        scheduler = FairScheduler(workshop.engine.capacity * 3 // 2)\n"
        "        if engine.slots == 6:\n"
        '            made = __import__("motet.runtime.newest_first", fromlist=["NewestFirst"]).NewestFirst\n'
        "            scheduler = made(scheduler.capacity)\n",
    ),
    "A tracker": (
        {},
        "observe/trackers.py",
        "TRACKERS: Mapping[str, tuple[str, Callable[..., StepObserver]]] = {\n",
        """class Printed:
    def __init__(self, job: ObservedJob) -> None:
        self._job = job

    def step(self, step: ObservedStep) -> None:
        print(f"tracked step {step.number} of {self._job.name}")

    def end(self, state: str) -> None:
        print(f"tracked {state} of {self._job.name}")


TRACKERS: Mapping[str, tuple[str, Callable[..., StepObserver]]] = {
    "printed": ("json", Printed),
""",
    ),
    "A server dialect": (
        {},
        "config/dialects.py",
        '"""The values of `rollout.engine` that name a server."""\n',
        '"""The values of `rollout.engine` that name a server."""\n'
        "from dataclasses import replace\n"
        'DIALECTS = {**DIALECTS, "third": replace(VLLM, name="Third", health_seconds=1.0)}\n',
    ),
    "An export format": (
        {},
        "commands/export.py",
        "FORMATS: Mapping[str, Format] = {",
        """def names(source: ExportSource, target: Path) -> None:
    (target / "name").write_text(source.adapter.name)


FORMATS: Mapping[str, Format] = {"names": Format(names), """,
    ),
    "A LoRA kernel": (
        {},
        "model/lora_products.py",
        "PRODUCTS: Mapping[str, Callable[[Arithmetic, torch.device, torch.dtype], LoraProducts]] = {\n",
        """class CountedProducts(PaddedProducts):
    def plan(self, layout: AdapterLayout, lengths: Sequence[int]) -> tuple[list[int], RowProducts]:
        print("planned by the new kernel")
        return super().plan(layout, lengths)


PRODUCTS: Mapping[str, Callable[[Arithmetic, torch.device, torch.dtype], LoraProducts]] = {
    "counted": lambda arithmetic, device, dtype: CountedProducts(dtype, arithmetic),
""",
    ),
    "A form of tool calls": (
        {
            "chat/forms/arrows.py": """
import json
from motet.core.types import ToolCall
from motet.chat.forms.calls import CallsRead, outside_strings

class Arrows:
    around = {"=>": ""}
    tags = ("=>",)
    bare = ""
    following = staticmethod(outside_strings)

    def read(self, pieces, schemas):
        text = "".join(pieces).removeprefix("=>")
        name, _, arguments = text.partition(" ")
        return CallsRead.of([(ToolCall(name, json.loads(arguments)), text)], "")

    def written(self, calls):
        return "".join(f"=>{one.name} {json.dumps(one.arguments)}" for one in calls)
"""
        },
        "chat/forms/table.py",
        '    "llama3_json": Llama(),\n',
        '    "llama3_json": Llama(),\n'
        '    "arrows": __import__("motet.chat.forms.arrows", fromlist=["Arrows"]).Arrows(),\n',
    ),
    "A wire protocol": (
        {
            "service/routes/greeting.py": """
from fastapi import APIRouter

router = APIRouter()

@router.get("/v1/greeting")
def greeting() -> dict[str, str]:
    return {"hello": "world"}
"""
        },
        "service/app.py",
        "ROUTES = (\n",
        'ROUTES = (\n    __import__("motet.service.routes.greeting", fromlist=["router"]),\n',
    ),
}
SEVERAL: Mapping[str, tuple[Mapping[str, str], tuple[tuple[str, str, str], ...]]] = {
    # where more than one line goes into existing files
    "An advantage": (
        {},
        (
            ("algorithms/advantages.py", '"batch_baseline", "none"]', '"batch_baseline", "signs", "none"]'),
            (
                "algorithms/advantages.py",
                '    "none": _none,\n',
                '    "signs": lambda groups: [np.sign(one) for one in _centered(groups)],\n    "none": _none,\n',
            ),
        ),
    ),
    "A chat format": (
        {
            "chat/shout.py": """
from motet.chat.completions import ChatRequest

class ShoutRequest(ChatRequest):
    pass
"""
        },
        (
            (
                "service/routes/completions.py",
                "class CompletionRequest(Sampled, Asked):\n",
                "from motet.chat.shout import ShoutRequest\n\nclass Shout(ShoutRequest, ServedChat):\n    pass\n\n"
                '@router.post("/shout", response_model=None)\nasync def shout(chats: ChatsDep, wanted: Shout) -> Response:\n'
                '    return await chats(wanted, "shout")\n\nclass CompletionRequest(Sampled, Asked):\n',
            ),
            (
                "environments/served_episode.py",
                '    "messages": MessagesRequest,\n',
                '    "messages": MessagesRequest,\n'
                '    "shout": __import__("motet.chat.shout", fromlist=["ShoutRequest"]).ShoutRequest,\n',
            ),
            (
                "service/routes/work.py",
                '@router.post("/episodes/{episode}/v1/messages", responses=STREAMED)\n',
                '@router.post("/episodes/{episode}/v1/shout", response_model=None)\n'
                "async def shout(episode: str, answers: Answers) -> Response:\n"
                '    return await answers(episode, "shout")\n\n\n'
                '@router.post("/episodes/{episode}/v1/messages", responses=STREAMED)\n',
            ),
        ),
    ),
    "A loss": (
        {},
        (
            ("algorithms/policy_gradient.py", '"gspo", "reinforce"]', '"gspo", "plain", "reinforce"]'),
            (
                "algorithms/losses.py",
                '    "reinforce": lambda _, inputs, __: reinforce(inputs),\n',
                '    "reinforce": lambda _, inputs, __: reinforce(inputs),\n'
                '    "plain": lambda _, inputs, __: (-inputs.logprobs_N, _nowhere(inputs.logprobs_N)),\n',
            ),
        ),
    ),
    "A data layout": (
        {},
        (
            ("data/columns.py", '"query", "input")', '"query", "input", "quiz")'),
            (
                "data/columns.py",
                '            layout = "verl\'s"\n',
                '            layout = "verl\'s"\n        if not named and prompt == "quiz":\n            layout = "Quiz"\n',
            ),
        ),
    ),
    "A command": (
        {},
        (
            (
                "commands/cli.py",
                "@app.command(epilog=EXAMPLE)\ndef run(\n",
                '@app.command()\ndef greet() -> None:\n    """Greet."""\n    typer.echo("hello")\n\n\n'
                "@app.command(epilog=EXAMPLE)\ndef run(\n",
            ),
            ("commands/overview.py", '"check", "doctor"),', '"check", "doctor", "greet"),'),
        ),
    ),
    "An environment": (
        {},
        (
            (
                "environments/episode.py",
                "ENVIRONMENTS: Mapping[str, Environment] = {",
                """
async def halved(context):
    rollouts = await single_turn(context)
    return tuple(replace(one, reward=0.5 * one.reward, reward_parts={"halved": one.reward}) for one in rollouts)


ENVIRONMENTS: Mapping[str, Environment] = {"halved": halved, """,
            ),
            ("config/job.py", '{"single": 1,', '{"halved": 1, "single": 1,'),
        ),
    ),
}
NEW = {
    name: text
    for files in [*(files for files, *_ in ADDED.values()), *(files for files, _ in SEVERAL.values())]
    for name, text in files.items()
}
"""The new files of all."""
LINES = [
    *((file, old, new) for _, file, old, new in ADDED.values()),
    *(line for _, several in SEVERAL.values() for line in several),
]
"""The lines of all: the file, what stands there, and what stands there then."""
USE = """
import sys
from pathlib import Path
import motet
from motet.environments.served_episode import ROUTES as EPISODES
from typer.testing import CliRunner
from motet.commands.cli import app
from motet.commands.export import write
from motet.config import DataConfig, RolloutConfig
from motet.model.arithmetic import Arithmetic
from motet.model.load import load_base
from motet.hosts.running import config_of, run_config
from motet.service.app import ROUTES
from motet.chat.template import Chat
from motet.data.columns import Columns

helped = CliRunner().invoke(app, ["--help"]).output
assert "Greet." in helped, helped
assert CliRunner().invoke(app, ["greet"]).output == "hello\\n"
assert Path(motet.__file__).is_relative_to(sys.argv[1]), motet.__file__
paths = {route.path for module in ROUTES for route in module.router.routes}
assert {"/v1/greeting", "/v1/shout", "/episodes/{episode}/v1/shout"} <= paths
assert "shout" in EPISODES
assert RolloutConfig(engine="third", urls=["http://127.0.0.1:1"]).engine == "third"
home = Path(sys.argv[1])
assert (write(home / "an-adapter", None, home / "names", "names") / "name").read_text() == "an-adapter"
job = {
    "data": {"source": "toy:add", "size": 16, "holdout": 0}, "reward": {"name": "length", "args": {"target": 3}}, "steps": 1,
    "sampling": {"max_tokens": 6}, "seed": 5, "environment": "halved",
}
jobs = [
    {**job, "name": kind, "algorithm": {"type": kind, "group_size": 4, "groups_per_step": 2}} for kind in ("grpo", "halved")
]
jobs.append({**jobs[0], "name": "lion", "optimizer": {"type": "lion", "lr": 1e-3, "weight_decay": 0.1}})
jobs.append({**jobs[0], "name": "stabilised", "adapter": {"type": "rslora", "rank": 4, "alpha": 8}})
jobs.append({**jobs[0], "name": "plain", "algorithm": {**jobs[0]["algorithm"], "loss": "plain"}})
jobs.append({**jobs[0], "name": "shouts", "reward": "shouts"})
quiz = [{"quiz": f"{n} + 1 =", "answer": str(n + 1)} for n in range(16)]
assert Columns.of(DataConfig(rows=quiz), quiz).text(DataConfig()).startswith("Quiz layout: prompt = quiz")
jobs.append({**jobs[0], "name": "quiz", "data": {"rows": quiz, "holdout": 0}})
jobs.append({**jobs[0], "name": "signs", "algorithm": {**jobs[0]["algorithm"], "advantage": "signs"}})
chat = Chat(load_base("small", device="cpu").info.tokenizer, tool_format="arrows")
tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
said = chat.tokenizer.encode('I look. =>look {"for": 1}', add_special_tokens=False)
(call,) = chat.parts([], said, tools, cut_off=False).calls
assert (call.name, call.arguments) == ("look", {"for": 1})
base = load_base("small", device="cpu", arithmetic=Arithmetic(products="counted"))
config = config_of(jobs, "small", {"samplers": 0, "threads": 1, "slots": 6, "kernels": "torch"}, "x", home / "run", ["printed"])
run = run_config(config, base=base)
assert all(one.state == "succeeded" for one in run.jobs.values()), run
"""
USE_TRAINED = """
import json
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from tests.support.triton_on_cpu import DEVICE
from transformers import AutoModelForCausalLM, AutoTokenizer
from motet.commands.export import write
from motet.commands.export_gguf import _plainly_scaled
from motet.commands.merging import ExportSource
from motet.config import JobConfig
from motet.config.chain import shape_of, take_shape
from motet.kernels.cuda.forward import halved
from motet.model.checkpoint import BaseCheckpoint
from motet.model.find import SMALL_BASE
from motet.hosts.slot_memory import SlotMemory
from motet.model.load import load_base
from motet.kernels.cover import compute_with
from motet.runtime.reference import shape_of as reference_shape
from motet.training.sharded.messages import RankStep
from motet.training.torch_trainer import TorchTrainer
from tests.support.segments import make_segment
from motet.core.batch import AdamW, Batch

home = Path(sys.argv[1])
x = torch.arange(100.0)
halved(x)
assert torch.equal(x, torch.arange(100.0) / 2)

model = AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
told, stored = model.state_dict(), home / "int8"
AutoTokenizer.from_pretrained(SMALL_BASE).save_pretrained(stored)
for path, layer in model.named_modules():
    if isinstance(layer, torch.nn.Linear) and path != "lm_head":
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        told[f"{path}.weight"] = (layer.weight.detach() / scale).round().to(torch.int8)
        told[f"{path}.weight_scale"] = scale
config = {**model.config.to_dict(), "quantization_config": {"quant_method": "int8_rows"}}
(stored / "config.json").write_text(json.dumps(config))
told = {name: tensor.clone() for name, tensor in told.items() if name != "lm_head.weight" or not config["tie_word_embeddings"]}
save_file(told, stored / "model.safetensors", {"format": "pt"})
checkpoint, path = BaseCheckpoint.of(str(stored), None, False), "model.layers.0.self_attn.q_proj"
wanted = model.get_submodule(path).weight.detach()
loads = (checkpoint.packed, checkpoint.unpacked)
packed, unpacked = (load(torch.float32, {"output_loading_info": True})[0].get_submodule(path) for load in loads)
packed.write(found := torch.empty_like(wanted))
assert torch.equal(found, unpacked.weight)
assert torch.allclose(found, wanted, atol=float(wanted.abs().max()) / 250)

job = {"name": "a", "data": "toy:add", "reward": "exact"}
tree = {**job, "optimizer": {"type": "lion", "weight_decay": 0.1}, "adapter": {"type": "rslora", "rank": 4, "alpha": 8}}
made = JobConfig.model_validate(tree)
assert JobConfig.model_validate(made.model_dump(mode="json")) == made
assert made.model_dump(mode="json", exclude_unset=True)["optimizer"] == tree["optimizer"]
lion = made.optimizer.at(1e-2, 0, 1)
assert (made.adapter.scale, lion.lr, lion.betas, lion.weight_decay) == (4.0, 1e-2, (0.9, 0.99), 0.1)
step = RankStep.of("a", lion)
assert step.optimizer == lion
assert RankStep.of("a", AdamW(1.0, clip_norm=float("inf"))).optimizer == AdamW(1.0, clip_norm=float("inf"))

for kernels in ("torch", "native"):
    base = load_base("small", device="cpu")
    if kernels == "native":
        compute_with(base, kernels)
    slot = [SlotMemory.of(base, "all-linear", 4, step=one).trained for one in (type(step.optimizer), AdamW)]
    assert slot[1] - slot[0] == 4 * base.adapter_layout("all-linear", 4).size

    def trained(names, **settings):
        trainer = TorchTrainer(base, slots=3, **settings)
        for name in names:
            trainer.add_adapter(name, made.adapter, ord(name))
        for _ in range(2):
            for name in names:
                trainer.forward_backward(Batch((make_segment(name),)))
            trainer.optim_steps([(name, step.optimizer) for name in names])
        return trainer

    together, parked, alone = trained("abc"), trained("abc", resident=1), trained("a")
    for other in (parked, alone):
        assert torch.equal(together.weights("a").flat, other.weights("a").flat)
    assert together.weights("a").scaling == 4.0
    place = home / f"saved-{kernels}"
    place.mkdir()
    together.save_adapter("a", place, optimizer=True)
    again = TorchTrainer(base, slots=1)
    again.add_adapter("a", made.adapter, 1)
    again.load_adapter("a", place, optimizer=True)
    for trainer in (again, together):
        trainer.forward_backward(Batch((make_segment("a"),)))
        trainer.optim_step("a", step.optimizer)
    assert torch.equal(together.weights("a").flat, again.weights("a").flat)
    assert again._arena("a").count == 3

saved = json.loads((place / "adapter_config.json").read_text())
assert (saved["use_rslora"], saved["r"], saved["lora_alpha"]) == (True, 4, 8.0)
assert shape_of(place)["type"] == "rslora"
assert reference_shape(place).scale == 4.0
assert take_shape(JobConfig.model_validate(job), shape_of(place)).adapter.scale == 4.0
plain = _plainly_scaled(ExportSource(place), home / "plain")
assert json.loads((plain / "adapter_config.json").read_text())["lora_alpha"] == 16.0
for form in ("peft", "merged"):  # whose consumers compute the same
    write(place, None, home / form, form)
"""


def used(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(home), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", script, str(home)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, cwd=home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def add(package: Path) -> None:
    new_files = [files for files, *_ in ADDED.values()] + [files for files, _ in SEVERAL.values()]
    for name, text in (one for files in new_files for one in files.items()):
        (package / name).write_text(text)
    for file, old, new in LINES:
        text = (package / file).read_text()
        (package / file).write_text(text.replace(old, new))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "src" / "motet", tmp_path / "motet")  # with what is compiled of the lines that stay
    return tmp_path / "motet"


def test_each_line_has_one_place_and_replaces_none() -> None:
    for file, old, new in LINES:
        text = (ROOT / "src" / "motet" / file).read_text()
        assert text.count(old) == 1, (file, old)
        assert _only_adds(text, text.replace(old, new)), (file, new)


@pytest.mark.soak
def test_one_of_each_is_added_where_the_page_says(package: Path) -> None:
    add(package)
    done = used(USE, package.parent)
    said = (
        "counted a step of halved",
        "ordered by the new policy",
        "charged halved",
        "tracked step 0 of halved",
        "planned by the new kernel",
    )
    assert all(one in done.stdout for one in said), done.stdout
    run = package.parent / "run"
    assert (run / "halved" / "noted").read_text() == "0"
    norms = [
        json.loads((run / kind / "metrics.jsonl").read_text().splitlines()[0])["grad_norm"]
        for kind in ("grpo", "halved")
    ]
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)
    assert (run / "signs" / "metrics.jsonl").read_text().count("grad_norm") == 1
    state = load_file(run / "lion" / "state" / "1" / "optimizer.safetensors")
    assert (sorted(state), float(state["step"])) == (["exp_avg", "step"], 1)
    stabilised = json.loads((run / "stabilised" / "versions" / "v1" / "adapter_config.json").read_text())
    assert stabilised["use_rslora"] is True
    rollouts = [json.loads(line) for line in (run / "grpo" / "rollouts" / "0.jsonl").read_text().splitlines()]
    assert all(one["reward"] == one["reward_parts"]["halved"] / 2 > 0 for one in rollouts)


@pytest.mark.soak
def test_added_optimizer_and_kind_of_lora_are_trained_kept_and_exported(package: Path) -> None:
    """Alone as together, off the device, from disk, by torch and by own kernels; consumers of an export compute the same."""
    add(package)
    used(USE_TRAINED, package.parent)


def _only_adds(before: str, after: str) -> bool:
    """Whether every word of a file is still there, in its order."""
    words = iter(re.findall(r"\w+|\S", after))
    return all(any(word == other for other in words) for word in re.findall(r"\w+|\S", before))


def test_the_page_names_these_files_and_no_more() -> None:
    page = (ROOT / "docs" / "extend.md").read_text().split("## How to add")[1]
    parts = {part.split("**")[1].rstrip("."): " ".join(part.split()) for part in re.split(r"\n\n(?=\*\*)", page)[1:]}
    touched = {what: {*files, file} for what, (files, file, *_) in ADDED.items()}
    touched |= {what: {*files, *(file for file, *_ in lines)} for what, (files, lines) in SEVERAL.items()}
    assert {what: len(files) for what, files in touched.items() if len(files) > 2} == {"A chat format": 4}
    for what, names in touched.items():
        for name in names:
            assert f"`{Path(name).parent}/`" in parts[what] if name in NEW else f"`{name}" in parts[what], (what, name)
