"""`motet chat`: talk to a base or an adapter, streamed."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from motet import budgets, seeds
from motet.config import DataConfig, EngineConfig
from motet.device import Device
from motet.launch import load
from motet.protocols import RolloutEngine
from motet.tasks.chat import Chat, stop_token_ids
from motet.types import AdapterRef, GenerateRequest, Message, Problem, SamplingParams


def chat_with(
    base_name: str,
    adapter: Path | None,
    *,
    temperature: float,
    top_p: float,
    max_tokens: int,
    system: str | None,
    seed: int,
) -> None:
    """Read lines, stream answers; the conversation goes on until an empty line or Ctrl-D."""
    console = Console(emoji=False)
    config = EngineConfig()
    base = load(base_name, config)
    from motet.rollout.embedded import EmbeddedEngine

    device = Device()
    per_token = budgets.kv_bytes_per_token(base.model.config.get_text_config(), base.dtype.itemsize)
    room = int(budgets.available_memory() * config.kv_memory_fraction) // per_token
    engine = EmbeddedEngine(
        base,
        device,
        max_rows=4,
        kv_tokens=min(base.max_positions + config.block_size, max(room, config.block_size)),
        block_size=config.block_size,
        prefill_tokens=base.max_positions,
    )
    chat = Chat.of(base.tokenizer, DataConfig(source="chat", chat_template=bool(base.tokenizer.chat_template)))
    stops = stop_token_ids(base.tokenizer, getattr(base.model, "generation_config", None))
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop_token_ids=stops)
    try:
        asyncio.run(_converse(console, engine, chat, params, adapter, system, seed))
    finally:
        device.close()


async def _converse(
    console: Console,
    engine: RolloutEngine,
    chat: Chat,
    params: SamplingParams,
    adapter: Path | None,
    system: str | None,
    seed: int,
) -> None:
    ref = None
    if adapter is not None:
        ref = AdapterRef("chat", 0)
        await engine.load_adapter(ref, adapter)
    answering = ref
    opening = [Message("system", system)] if system else []
    messages = list(opening)
    console.print(f"[dim]{'adapter ' + str(adapter) if ref else 'base'}; an empty line ends, /new starts over[/dim]")
    while True:
        try:
            line = (await asyncio.to_thread(input, "> ")).strip()
        except EOFError:
            return
        if not line:
            return
        if line in ("/base", "/adapter", "/new"):
            answering = None if line == "/base" else ref if line == "/adapter" else answering
            messages = list(opening)
            console.print(f"[dim]{'adapter' if answering else 'base'} answers; a new conversation begins[/dim]")
            continue
        messages.append(Message("user", line))
        prompt_ids = chat.prompt_ids(Problem(0, tuple(messages), ""))
        keys = (seeds.key(seed, "chat", len(messages)),)
        request = GenerateRequest(f"chat/{len(messages)}", "chat", prompt_ids, answering, params, keys, stream=True)
        answer = ""
        async for chunk in engine.generate(request):
            console.print(chunk.text, end="", markup=False, highlight=False, soft_wrap=True)
            answer += chunk.text
        console.print()
        messages.append(Message("assistant", answer))
