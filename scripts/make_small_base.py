"""Make the small base: generate text, train a tokenizer, train a Llama of 2.8 million parameters.

    python scripts/make_small_base.py --out src/motet/assets/small-base --compile    # half an hour, one thread
    python scripts/make_small_base.py --out src/motet/assets/small-base --evaluate   # a minute or two

Everything is generated (see `small_base_text.py`): no download, no foreign text. The result is a plain Hugging
Face directory, with a model card that states its accuracies.
Shapes: `B` rows, `L` tokens of a row, `T` trained tokens of a batch, `D` model width, `V` vocabulary.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from motet.data.toys import FAMILIES, make_rows
from small_base_text import CARD, CLEAN, END, PAD, RIGHT, START, TERSE, Turn, document, segments

TEMPLATE = (
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
ROW = 128  # tokens of a training row; documents are packed whole and do not see each other
ROWS = 16  # rows of a step
PEAK_LR, WARMUP = 2.5e-3, 150


@dataclass(frozen=True)
class Document:
    """One tokenized document."""

    tokens: list[int]
    trained: list[bool]  # whether predicting the token counts; never the first


@dataclass(frozen=True)
class Batch:
    """One step's rows."""

    tokens_BL: torch.Tensor  # int64 [B, L]
    positions_BL: torch.Tensor  # int64 [B, L], from 0 in each document: so `transformers` keeps them apart
    trained_BL: torch.Tensor  # bool [B, L], whether predicting this token counts; never a document's first


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 1,024 tokens; every digit and every capital letter is a token of its own."""
    rng = random.Random(seed)
    texts = ("".join(text for text, _ in segments(document(rng))) for _ in range(30_000))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[A-Z]|\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=[PAD, START, END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config._attn_implementation = "eager"  # on a CPU a third faster to train than SDPA with rows this short
    return LlamaForCausalLM(config)


def batches(tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> Iterator[Batch]:
    """Steps of freshly generated text, each row filled with whole documents and padded at its end.

    In the first `CLEAN` of the steps every answer is right: so the model learns to answer in half the time.
    """
    rng, pad = random.Random(seed), tokenizer.pad_token_id
    waiting = Document([], [])
    for step in range(steps):
        right = 1.0 if step < CLEAN * steps else RIGHT
        rows: list[tuple[list[int], list[int], list[bool]]] = []
        while len(rows) < ROWS:
            tokens: list[int] = []
            positions: list[int] = []
            trained: list[bool] = []
            while len(tokens) + len(waiting.tokens) <= ROW:
                tokens += waiting.tokens
                positions += range(len(waiting.tokens))
                trained += waiting.trained
                waiting = encoded(document(rng, right), tokenizer, rng)
            short = ROW - len(tokens)
            rows.append((tokens + [pad] * short, positions + list(range(short)), trained + [False] * short))
        yield Batch(*(torch.tensor([row[i] for row in rows]) for i in range(3)))


def encoded(turns: list[Turn], tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Document:
    tokens: list[int] = []
    trained: list[bool] = []
    for text, share in segments(turns):
        ids = tokenizer.backend_tokenizer.encode(text).ids
        tokens += ids
        trained += [rng.random() < share for _ in ids]
    return Document(tokens[:ROW], [False, *trained[1:ROW]])


def loss_of(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean negative log-likelihood of the trained tokens; the head runs for these only."""
    with torch.autocast("cpu", torch.bfloat16):
        states_BLD = model.model(batch.tokens_BL, position_ids=batch.positions_BL, use_cache=False).last_hidden_state
        targets_BL = batch.trained_BL[:, 1:]
        logits_TV = model.lm_head(states_BLD[:, :-1][targets_BL])
    return F.cross_entropy(logits_TV.float(), batch.tokens_BL[:, 1:][targets_BL])


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    return PEAK_LR * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))))


def train(out: Path, steps: int, seed: int, save_every: int, compiled: bool) -> None:
    """Train from scratch and write the directory at the end, and every `save_every` steps if that is not 0."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer)
    if compiled:
        model.model.compile(dynamic=False)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), fused=True)
    print(f"{model.num_parameters():,} parameters, {steps} steps of {ROWS * ROW} tokens", flush=True)
    began, recent = time.monotonic(), []
    for step, batch in enumerate(batches(tokenizer, seed + 1, steps)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(loss.item())
        done = step + 1
        if done % 100 == 0 or done == steps:
            seconds, loss_mean = time.monotonic() - began, sum(recent) / len(recent)
            rate, left = done * ROWS * ROW / seconds, seconds / done * (steps - done) / 60
            print(f"step {done} loss {loss_mean:.4f} {rate:.0f} tok/s {left:.1f} min left", flush=True)
            recent = []
        if done == steps or (save_every and done % save_every == 0):
            export(model, tokenizer, out)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the directory; weights in bf16, files replaced one by one."""
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    config = LlamaConfig.from_dict(model.config.to_dict())
    copy = LlamaForCausalLM(config)
    copy.bfloat16()
    copy.load_state_dict(state)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    copy.generation_config = GenerationConfig(**ends)
    copy.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(out)
    # The fields that transformers 4 and 5 read alike; the latter alone would write some that the former refuses.
    known: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "padding_side": "left",
    }
    known |= {"model_max_length": 1024, "clean_up_tokenization_spaces": False}
    (out / "tokenizer_config.json").write_text(json.dumps(known, indent=2) + "\n")


@torch.inference_mode()
def sample(model: Any, tokenizer: Any, prompts: list[str], greedy: bool) -> list[str]:
    """One completion of at most 16 tokens for each prompt, through the chat template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    shape = {"padding": True, "return_dict": True, "return_tensors": "pt"}
    inputs = tokenizer.apply_chat_template(chats, add_generation_prompt=True, **shape)
    how = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    out = model.generate(**inputs, max_new_tokens=16, **how)
    texts: list[str] = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def evaluate(where: Path, problems: int, seed: int) -> None:
    """Print, and write into the model card, how completions of held-out problems score in each family."""
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(where)
    model: Any = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32)
    table = [
        "| family | exact | contains | mixed groups | greedy exact | greedy contains |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(table), flush=True)
    for family in FAMILIES:
        shares = scores(model, tokenizer, family, problems, seed)
        table.append(f"| {family} | {' | '.join(f'{share:.2f}' for share in shares)} |")
        print(table[-1], flush=True)
    filled = CARD.format(
        parameters=model.num_parameters(),
        clean=CLEAN,
        right=RIGHT,
        wrong=1 - RIGHT,
        terse=TERSE,
        both=RIGHT * TERSE,
        problems=problems,
        table="\n".join(table),
    )
    (where / "README.md").write_text(filled)


def scores(model: Any, tokenizer: Any, family: str, problems: int, seed: int) -> list[float]:
    """The columns of the table: shares of the samples (8 a problem) and of the greedy completions."""
    rows = make_rows(family, problems, seed, held_out=True)
    repeated = [row for row in rows for _ in range(8)]
    exact, contained = _marks(repeated, sample(model, tokenizer, [row["prompt"] for row in repeated], greedy=False))
    mixed = [0 < sum(exact[i : i + 8]) < 8 for i in range(0, len(exact), 8)]
    greedy = _marks(rows, sample(model, tokenizer, [row["prompt"] for row in rows], greedy=True))
    return [sum(hits) / len(hits) for hits in (exact, contained, mixed, *greedy)]


def _marks(rows: list[dict[str, Any]], texts: list[str]) -> tuple[list[bool], list[bool]]:
    """Whether each text is its row's answer, and whether it contains it."""
    pairs = [(text, row["answer"]) for text, row in zip(texts, rows, strict=True)]
    contained = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None for text, answer in pairs]
    return [text == answer for text, answer in pairs], contained


def main() -> None:
    parser = argparse.ArgumentParser(description="Make, or evaluate, the small base.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write, or to read with --evaluate")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=0, help="write the directory also after so many steps")
    parser.add_argument("--compile", action="store_true", help="a quarter faster; needs a C++ compiler")
    parser.add_argument("--evaluate", action="store_true", help="do not train")
    parser.add_argument("--problems", type=int, default=64, help="held-out problems of each family")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if not args.evaluate:
        train(args.out, args.steps, args.seed, args.save_every, args.compile)
    evaluate(args.out, args.problems, args.seed)


if __name__ == "__main__":
    main()
