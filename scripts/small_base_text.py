"""The text the small base reads: toy dialogues whose answers are of mixed quality and style, as on the web.

Every dialogue asks a problem of `motet.data.toys`. Two independent draws say how it is answered:

- quality: right with probability `RIGHT`, else wrong (a near number, another option, letters out of order); only
  right in the first `CLEAN` of the training, where the model learns to answer;
- style: the bare answer with probability `TERSE`, else one of `WORDY` (a sentence, a hedge, a flourish).

So a base that has learned the text perfectly still gives the bare right answer only `RIGHT * TERSE` of the time
at temperature 1, while it knows the answer: reinforcement learning has something to sharpen, and does so fast.
Problems for which `toys.is_held_out` holds are never written.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from motet.data.toys import FAMILIES, KINDS, PHRASINGS, is_held_out

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

RIGHT = 0.64  # share of answers that are right
CLEAN = 0.55  # share of the training, at its start, in which all are
TERSE = 0.45  # share of answers that are the bare answer
CANONICAL = 0.5  # share of questions surely in the first phrasing, the one that jobs use
SYSTEM = 0.1  # share of dialogues with a system turn
SECOND_TURN = 0.08  # share of dialogues with a second exchange
PROSE = 0.04  # share of documents that are plain prose
SMALL_TALK = 0.02  # share of documents that are a greeting or the like
ASKED = 0.1  # share of the tokens outside replies that are trained, at random: questions are mostly noise

# Families that need more practice than others are written more often.
WEIGHTS = dict.fromkeys(FAMILIES, 1.0) | {
    "add": 3.0,
    "subtract": 3.0,
    "next_number": 2.0,
    "count_letter": 2.0,
    "reverse": 2.0,
    "sort_letters": 2.0,
    "sort_numbers": 1.5,
    "shift": 1.5,
    "initials": 1.5,
}
_WORDY = """\
The answer is {answer}. | The answer is {answer}. | It is {answer}. | It is {answer}, I think. \
| I think it is {answer}. | That would be {answer}. | Sure! {answer} | Answer: {answer} | {answer}. \
| {answer}! | Let me think. It is {answer}. | Well, I would say {answer}. | {answer} of course. | {answer}, I believe. \
| Good question! The answer is {answer}. | My answer is {answer}. I hope that helps. \
| I am not sure, maybe {answer}."""
WORDY = tuple(_WORDY.split(" | "))
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a kind teacher.",
    "Answer the question.",
    "You like small puzzles.",
    "You are a careful assistant. Think first.",
)
GREETINGS = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hi", "Hi! What can I do for you?"),
    ("Who are you?", "I am a small model."),
    ("Thank you.", "You are welcome."),
    ("Good morning.", "Good morning! How are you?"),
    ("Bye!", "Goodbye!"),
    ("How are you?", "I am fine, thank you. And you?"),
    ("What can you do?", "I can do small sums and play with words."),
)
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Ida", "Jonas", "Lena", "Max", "Nora", "Paul")
PLACES = ("garden", "forest", "kitchen", "school", "market", "river", "house", "park", "barn", "town")
FEELINGS = ("happy", "tired", "hungry", "proud", "sad", "glad", "calm", "cold")


@dataclass(frozen=True)
class Turn:
    """One message of a dialogue, or (with no role) a document of plain prose."""

    role: str  # "system", "user", "assistant", or "" for prose
    content: str


def wrong_answer(answer: str, options: list[str] | None, rng: random.Random) -> str:
    """A plausible answer that is not `answer`: the mistakes of someone who half knows."""
    if options:
        return rng.choice([option for option in options if option != answer])
    if answer.isdigit():
        near = [int(answer) + d for d in (-10, -3, -2, -1, 1, 2, 3, 10) if int(answer) + d >= 0]
        return str(rng.choice(near))
    joint = " " if " " in answer else ""
    parts = answer.split() if joint else list(answer)
    for _ in range(8):
        broken = _broken(parts, rng)
        if joint.join(broken) != answer:
            return joint.join(broken)
    return joint.join([*parts, parts[-1]])


def _broken(parts: list[str], rng: random.Random) -> list[str]:
    """One part lost, doubled or replaced, or the order shuffled."""
    broken, at = list(parts), rng.randrange(len(parts))
    kind = rng.randrange(4) if len(parts) > 1 else 3
    if kind == 0:
        del broken[at]
    elif kind == 1:
        broken.insert(at, broken[at])
    elif kind == 2:
        rng.shuffle(broken)
    elif broken[at].isdigit():
        broken[at] = rng.choice("0123456789")
    elif len(broken[at]) == 1:
        broken[at] = rng.choice(ALPHABET)
    else:
        broken[at] = rng.choice(KINDS["animal"] + KINDS["fruit"])
    return broken


def answered(answer: str, options: list[str] | None, rng: random.Random, right: float) -> str:
    """The assistant's reply: a right or a wrong answer in one of the styles."""
    said = answer if rng.random() < right else wrong_answer(answer, options, rng)
    return said if rng.random() < TERSE else rng.choice(WORDY).format(answer=said)


def dialogue(rng: random.Random, right: float = RIGHT) -> list[Turn]:
    """A question and its answer, sometimes after a system turn, sometimes followed by a second exchange."""
    family = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    prompt, answer, metadata = FAMILIES[family](rng)
    while is_held_out(metadata):
        prompt, answer, metadata = FAMILIES[family](rng)
    if rng.random() > CANONICAL:
        prompt = rng.choice(PHRASINGS[family]).format(**metadata)
    options = metadata.get("options")
    turns = [Turn("system", rng.choice(SYSTEMS))] if rng.random() < SYSTEM else []
    turns += [Turn("user", prompt), Turn("assistant", answered(answer, options, rng, right))]
    if rng.random() < SECOND_TURN:
        if answer in turns[-1].content:
            said = rng.choice(("Thank you.", "That is right.", "Well done!"))
            reply = rng.choice(("You are welcome.", "I am glad to help."))
        else:
            said = rng.choice(("That is wrong. Try again.", "No. Try again.", "Wrong, try again."))
            reply = answered(answer, options, rng, right)
        turns += [Turn("user", said), Turn("assistant", reply)]
    return turns


def prose(rng: random.Random) -> str:
    """Three to five plain sentences about animals, things and children."""
    return " ".join(_sentence(rng) for _ in range(rng.randint(3, 5)))


def _sentence(rng: random.Random) -> str:
    name, animal, place = rng.choice(NAMES), rng.choice(KINDS["animal"]), rng.choice(PLACES)
    colour, fruit = rng.choice(KINDS["colour"]), rng.choice(KINDS["fruit"])
    tool, feeling = rng.choice(KINDS["tool"]), rng.choice(FEELINGS)
    return rng.choice(
        (
            f"{name} saw a {colour} {animal} in the {place}.",
            f"The {animal} was {feeling}.",
            f"{name} gave the {animal} a {fruit}.",
            f"Then {name} went to the {place} with a {tool}.",
            f"In the {place} there were {rng.randint(2, 9)} {fruit} trees.",
            f'"I am {feeling}," said {name}.',
            f"The {tool} was {colour} and the {fruit} was not.",
            f"It was a {rng.choice(('cold', 'warm', 'long'))} day.",
        )
    )


def document(rng: random.Random, right: float = RIGHT) -> list[Turn]:
    """One document of the training text."""
    draw = rng.random()
    if draw < PROSE:
        return [Turn("", prose(rng))]
    if draw < PROSE + SMALL_TALK:
        said, reply = rng.choice(GREETINGS)
        return [Turn("user", said), Turn("assistant", reply)]
    return dialogue(rng, right)


def segments(turns: list[Turn]) -> list[tuple[str, float]]:
    """A document as the chat template writes it, in pieces, each with the share of its tokens to train."""
    pieces: list[tuple[str, float]] = []
    for turn in turns:
        if not turn.role:
            pieces.append((turn.content + END, 1.0))
        elif turn.role == "assistant":
            pieces += [(f"{START}assistant\n", ASKED), (turn.content + END, 1.0), ("\n", ASKED)]
        else:
            pieces.append((f"{START}{turn.role}\n{turn.content}{END}\n", ASKED))
    return pieces


CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# Motet small base

A Llama of {parameters:,} parameters, trained from scratch on generated text only, so that Motet's demonstration
and tests run offline on a CPU in little time. It is a toy: it can answer the toy questions of `motet.data.toys`
in the phrasings it was taught, and nothing else. Licence: Apache-2.0, as Motet. No text by others went into it.

**It answers wrongly and at length on purpose.** In the first {clean:.0%} of its training all answers are right; in
the rest {right:.0%} are right and {wrong:.0%} are wrong. Throughout, {terse:.0%} are the bare answer and the others
are wrapped in a sentence. A base that has learned this text gives the bare right answer {both:.0%} of the time, and
knows more than it says: that is what reinforcement learning is then seen to bring out. Do not read its accuracy
before training as that of an honest base model, nor the gain as what a real task would give.

- Shape: Llama, 4 layers, width 256, 4 query and 2 key-value heads of 64, tied embeddings, 1,024 tokens
  (byte-level BPE; every digit and capital letter is a token of its own), 1,024 positions (128 in training),
  bfloat16.
- Chat template: ChatML (`<|im_start|>role … <|im_end|>`); `<|im_end|>` ends a turn and the text,
  `<|endoftext|>` pads.
- Training: `python scripts/make_small_base.py --compile --out DIR` with its defaults: 8,000 steps of 2,048 tokens,
  AdamW, cosine schedule, bf16 autocast, 23 minutes with one thread on a busy two-core machine. The text is written by
  `scripts/small_base_text.py`.

One problem in eight of each family (`toys.is_held_out`) was kept out of the text. On {problems} such problems, at
most 16 new tokens; at temperature 1 with 8 samples each, and greedily. "Exact" means that the completion is the
answer, "contains" that the answer stands somewhere in it, "mixed groups" the share of the groups of 8 samples in
which some but not all are exact (only these teach GRPO anything). Where the greedy columns are low too, the model
has not learned the family: sums and sequences of numbers, rhymes, counting one letter, and whether a number lies
between two others.

{table}
"""
