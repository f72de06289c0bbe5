"""An agent that does one wrong thing or another by its seed, and what may come of it at most."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]

HOSTILE = """
import asyncio, os, random, signal, subprocess, sys, time
import openai

stock = openai.AsyncOpenAI(api_key="none", max_retries=0)
KINDS = ("plain", "twice", "again", "parallel", "raises", "hangs", "stuck", "killed", "late", "leaves early")

async def run(problem, base_url, api_key, seed, deadline):
    client = stock.with_options(base_url=base_url, api_key=api_key)
    if "MARKS" in os.environ:
        with open(os.path.join(os.environ["MARKS"], str(os.getpid())), "a") as out:
            out.write(".")
    async def ask(text, retry=0):
        said = await client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}], extra_headers={"x-stainless-retry-count": str(retry)})
        return said.id, said.usage.prompt_tokens
    kind = KINDS[seed % len(KINDS)]
    if kind == "twice":
        first, second = await asyncio.gather(ask("hi"), ask("hi"))
        assert first != second
        return 2.0
    if kind == "again":
        answers = [await ask("hi"), await ask("hi", 1), await ask("hi", 2)]
        assert len(set(answers)) == 1, answers
        return 3.0
    if kind == "parallel":
        answers = await asyncio.gather(*(ask("A " * (n + 1)) for n in reversed(range(4))))
        read = [tokens for _, tokens in answers]
        assert sorted(set(read), reverse=True) == read, read  # each has the answer to its own question
        return 4.0
    if kind == "leaves early":
        task = asyncio.create_task(ask("hi"))
        await asyncio.sleep(0.01)
        return 5.0
    await ask("hi")
    if kind == "raises":
        raise RuntimeError("no luck")
    if kind == "hangs":
        await asyncio.sleep(3600)
    if kind == "stuck":
        await asyncio.to_thread(time.sleep, deadline - time.time() + 14)
    if kind == "killed":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        child.kill()
        child.wait()
        raise RuntimeError("its helper was killed")
    if kind == "late":
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            try:
                await ask("is it too late?")
            except openai.APIError:
                return 6.0
            return 7.0
    return 1.0
"""


def in_use(process: Any = None) -> dict[str, Any]:
    """What a process holds that others could be left without; this one by default."""
    gc.collect()
    process = process or psutil.Process()
    connections = [one for one in process.net_connections() if one.status != psutil.CONN_NONE]
    return {
        "files": len(process.open_files()),
        "descriptors": process.num_fds(),
        "connections": len(connections),
        "children": sorted(child.pid for child in process.children(recursive=True)),
    }


def assert_fair(lines: Sequence[dict[str, Any]]) -> None:
    """Each episode counts once, for what it did before its end, and those that failed say why."""
    turns = {(line["reward"], len(line["turns"])) for line in lines if not line["error"]}
    expected = {(1.0, 1), (2.0, 2), (3.0, 1), (4.0, 4)}
    assert turns - {(5.0, 1)} == expected, "each counted once, and nothing after its end"  # 5: answered before it left
    errors = Counter(line["error"].rpartition(" (")[0] or line["error"] for line in lines if line["error"])
    told = " ".join(errors)
    for reason in ("no luck", "did not return in time", "its helper was killed"):
        assert reason in told, errors
    assert set(errors) <= {
        "the agent RuntimeError: no luck", "the agent RuntimeError: its helper was killed", "the agent did not return in time",
        "the agent never called the model",
    }, errors  # fmt: skip
