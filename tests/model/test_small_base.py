"""The small base that ships in the package, and the toy problems it was taught."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet.data.toys import FAMILIES, KINDS, PHRASINGS, RHYMES, is_held_out, make_rows

DEMO = ("sort_letters", "reverse", "count_letters", "shift")  # the families of the demonstration


def rhymes(a: str, b: str) -> bool:
    return any(a in group and b in group for group in RHYMES)


def steps(numbers: str) -> int:
    """How many different differences neighbours have."""
    values = [int(number) for number in numbers.split()]
    return len({b - a for a, b in itertools.pairwise(values)})


CHECKS: dict[str, Any] = {  # by another road than the generator's where there is one
    "add": lambda r: int(r["answer"]) - r["a"] == r["b"],
    "subtract": lambda r: int(r["answer"]) + r["b"] == r["a"] and int(r["answer"]) >= 0,
    "larger": lambda r: int(r["answer"]) == (r["a"] if r["a"] > r["b"] else r["b"]),
    "largest": lambda r: all(int(r["answer"]) >= int(n) for n in r["listed"].split()) and r["answer"] in r["options"],
    "sort_numbers": lambda r: (
        Counter(r["answer"]) == Counter(r["listed"]) and list(r["answer"][::2]) == sorted(r["answer"][::2])
    ),
    "sort_letters": lambda r: (
        set(r["answer"]) == set(r["word"])
        and all(a < b for a, b in itertools.pairwise(r["answer"]))
        and len(r["answer"]) == 5
    ),
    "reverse": lambda r: "".join(reversed(r["answer"])) == r["word"],
    "spell": lambda r: r["answer"].replace(" ", "") == r["word"] and r["answer"].count(" ") == len(r["word"]) - 1,
    "count_letter": lambda r: int(r["answer"]) == len(r["word"]) - len(r["word"].replace(r["letter"], "")) > 0,
    "count_letters": lambda r: int(r["answer"]) == sum(1 for _ in r["word"]),
    "last_letter": lambda r: r["word"].endswith(r["answer"]) and len(r["answer"]) == 1,
    "shift": lambda r: all(ord(b) - ord(a) == 1 for a, b in zip(r["word"], r["answer"], strict=True)),
    "initials": lambda r: all(
        w.upper().startswith(a) for w, a in zip(r["listed"].split(", "), r["answer"], strict=True)
    ),
    "repeat": lambda r: Counter(r["answer"].split()) == {r["word"]: r["n"]},
    "parity": lambda r: r["answer"] == ("odd" if str(r["a"])[-1] in "13579" else "even"),
    "pick": lambda r: [o for o in r["options"] if o in KINDS[r["kind"]]] == [r["answer"]],
    "between": lambda r: (r["answer"] == "yes") == (r["a"] in range(r["low"] + 1, r["high"])),
    "rhyme": lambda r: [o for o in r["options"] if rhymes(o, r["word"])] == [r["answer"]],
    "next_number": lambda r: steps(f"{r['listed']} {r['answer']}") == 1,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_toy_answers_are_right(family):
    rows = make_rows(family, 200, seed=3)
    assert len(rows) == 200
    for row in rows:
        assert CHECKS[family](row), row
        assert row["prompt"] == PHRASINGS[family][0].format(**row)


@pytest.mark.parametrize("family", FAMILIES)
def test_toy_rows_depend_on_the_seed_alone(family):
    random.seed(1)
    first = make_rows(family, 40, seed=7)
    random.seed(2)
    assert make_rows(family, 40, seed=7) == first
    assert make_rows(family, 40, seed=8) != first
    assert make_rows(family, 20, seed=7) == first[:20]
    assert len({row["prompt"] for row in first}) == 40


def test_toy_problems_are_held_out_by_themselves():
    for family in FAMILIES:
        names = {"prompt", "answer", "family"}
        for held_out in (True, False):
            rows = make_rows(family, 20, seed=0, held_out=held_out)
            assert all(is_held_out({k: v for k, v in r.items() if k not in names}) == held_out for r in rows)


def test_an_exhausted_family_repeats_itself():
    rows = make_rows("repeat", 1000, seed=0, held_out=True)
    assert len(rows) == 1000 > len({row["prompt"] for row in rows})


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=r"unknown toy family.*choose one of add,"):
        make_rows("multiply", 1, seed=0)


@pytest.fixture(scope="module")
def tokenizer(small_base_dir):
    return AutoTokenizer.from_pretrained(small_base_dir)


@pytest.fixture(scope="module")
def model(small_base_dir):
    return AutoModelForCausalLM.from_pretrained(small_base_dir, dtype=torch.float32)


def test_the_directory_is_small_and_complete(small_base_dir):
    files = {path.name: path.stat().st_size for path in small_base_dir.iterdir()}
    assert sum(files.values()) < 12e6
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= files.keys()
    assert {"generation_config.json", "chat_template.jinja", "README.md"} <= files.keys()


def test_the_model_is_a_small_stock_llama(model):
    assert type(model).__name__ == "LlamaForCausalLM"
    assert 2_500_000 <= model.num_parameters() <= 3_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.num_attention_heads > model.config.num_key_value_heads
    assert model.config.max_position_embeddings >= 512


def test_the_chat_template_renders_every_role(tokenizer):
    turns = [{"role": role, "content": f"I am {role}."} for role in ("system", "user", "assistant")]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in turns)
    asked = tokenizer.apply_chat_template(turns[:2], tokenize=False, add_generation_prompt=True)
    assert text.startswith(asked)
    assert asked.endswith("<|im_start|>assistant\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 3


@pytest.mark.parametrize(
    "text", ["What is 12 + 7?", "naïve Ωμέγα 日本語 🎻\u200d🎶", "\t\r\n  two  spaces \x00\x7f", "Ⅷ٣𝟜 ABC\u0301"]
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert max(ids) < 1024


def test_digits_and_capitals_are_tokens_of_their_own(tokenizer):
    assert tokenizer.tokenize("2048") == list("2048")
    assert tokenizer.tokenize("MOTET") == list("MOTET")


def completions(model, tokenizer, prompts, **how):
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.inference_mode():
        out = model.generate(**inputs, max_new_tokens=16, **how)
    return out[:, inputs["input_ids"].shape[1] :]


def test_the_end_of_turn_token_ends_a_turn(model, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    rows = make_rows("sort_letters", 16, seed=1, held_out=True)
    for ids in completions(model, tokenizer, [row["prompt"] for row in rows], do_sample=False).tolist():
        end = ids.index(tokenizer.eos_token_id)
        assert set(ids[end + 1 :]) <= {tokenizer.pad_token_id}


@pytest.mark.parametrize("family", DEMO)
def test_the_demo_families_succeed_sometimes(model, tokenizer, family):
    """Neither never nor mostly: there is something to learn, and something to learn it from."""
    torch.manual_seed(0)
    rows = make_rows(family, 24, seed=0, held_out=True)
    prompts = [row["prompt"] for row in rows for _ in range(8)]
    ids = completions(model, tokenizer, prompts, do_sample=True, temperature=1.0, top_k=0)
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    right = [text == rows[i // 8]["answer"] for i, text in enumerate(texts)]
    assert 0.05 < sum(right) / len(right) < 0.5
    mixed = [0 < sum(right[i : i + 8]) < 8 for i in range(0, len(right), 8)]
    assert sum(mixed) / len(mixed) > 0.5
