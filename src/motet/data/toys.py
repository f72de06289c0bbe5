"""Toy task families: small problems with one right answer, generated from a seed. Standard library only.

The text on which the small base (`motet/assets/small-base`) was trained is written with these families, so a
job on one of them finds a base that succeeds sometimes.

    from motet.data.toys import make_rows
    rows = make_rows("add", 256, seed=0, held_out=True)   # problems the base has never read
    rows[0]["prompt"], rows[0]["answer"]                   # "What is 12 + 7?", "19"

Words whose letters matter are written in capitals, because each capital letter (and each digit) is one token of the
small base.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from typing import Any

Problem = tuple[str, str, dict[str, Any]]  # prompt, answer, metadata

_KINDS = """\
animal: ant bear bird camel cat cow crab deer dog duck fish fox frog goat goose hen horse lion mole mouse \
owl panda pig rabbit rat seal shark sheep snake spider swan tiger toad whale wolf zebra
fruit: apple apricot banana berry cherry date fig grape kiwi lemon lime mango melon olive orange papaya \
peach pear plum quince
colour: beige black blue brown cyan gold green grey indigo pink purple red scarlet silver violet white yellow
tool: axe broom brush drill fork hammer knife ladder needle pen pliers rake ruler saw shovel spade spoon wrench"""
_RHYMES = """\
cat hat bat mat rat flat that/dog fog log frog jog/sun run fun bun gun/tree bee sea key knee three/\
day play way say stay grey/light night right bite kite white/ring king sing thing wing spring/\
cake lake make snake take/house mouse/moon soon spoon noon/star car far jar/ball call tall wall fall/\
bed red head bread/book look cook hook/boat coat goat note/pin tin win fin/rain train plane chain/\
hen pen ten men/sky fly pie high dry/blue shoe two new/box fox socks rocks"""
# The wordings of each family; `FAMILIES` uses the first. The fields are those of its metadata.
_PHRASINGS = """\
add: What is {a} + {b}? | Add {a} and {b}. | {a} + {b} = | How much is {a} plus {b}?
subtract: What is {a} - {b}? | Take {b} away from {a}. | {a} - {b} = | How much is {a} minus {b}?
larger: Which is larger, {a} or {b}? | Give the larger of {a} and {b}. | Pick the bigger number: {a} or {b}
largest: What is the largest of {listed}? | Find the biggest number: {listed} | Give the maximum of {listed}.
sort_numbers: Sort these numbers: {listed} | Put in order: {listed} | Write {listed} from small to large.
sort_letters: Sort the letters of {word}. | Put the letters of {word} in order. | Order the letters: {word}
reverse: Write {word} backwards. | Reverse the word {word}. | What is {word} read from the end?
spell: Spell {word} with spaces. | Write {word} letter by letter. | Put spaces between the letters of {word}.
count_letter: How many times is {letter} in {word}? | Count the letter {letter} in {word}. \
| How many {letter} are in {word}?
count_letters: How many letters are in {word}? | Count the letters of {word}. | How long is the word {word}?
last_letter: What is the last letter of {word}? | Give the final letter of {word}. | How does {word} end?
shift: Write the letter after each letter of {word}. | Shift {word} by one letter. \
| Move each letter of {word} one forward.
initials: Give the first letters of: {listed} | What are the initials of {listed}? | Write the first letters: {listed}
repeat: Repeat {word} {n} times. | Write the word {word} {n} times. | Say {word} {n} times.
parity: Is {a} odd or even? | Odd or even: {a} | Tell me if {a} is odd or even.
pick: Which is a kind of {kind}: {listed}? | Pick the {kind}: {listed} | One of {listed} is a {kind}. Which one?
between: Is {a} between {low} and {high}? | Yes or no: is {a} between {low} and {high}? \
| Does {a} lie between {low} and {high}?
rhyme: Which word rhymes with {word}: {listed}? | Pick a rhyme for {word}: {listed} | What rhymes with {word}, {listed}?
next_number: What comes next: {listed} | Continue: {listed} | Give the next number after {listed}."""


def _table(text: str, separator: str) -> dict[str, tuple[str, ...]]:
    """Lines `name: item<separator>item…` as a dict."""
    rows = (line.split(": ", 1) for line in text.split("\n"))
    return {name: tuple(items.split(separator)) for name, items in rows}


KINDS = _table(_KINDS, " ")
RHYMES = tuple(tuple(group.split()) for group in _RHYMES.split("/"))
WORDS = tuple(sorted({word for kind in KINDS.values() for word in kind}))
PHRASINGS = _table(_PHRASINGS, " | ")


def _problem(family: str, answer: object, **metadata: Any) -> Problem:
    return PHRASINGS[family][0].format(**metadata), str(answer), metadata


def _pseudo_word(rng: random.Random, shortest: int, longest: int) -> str:
    """A word-like string of capitals, consonants and vowels in turn: about 10^4 to 10^6 different ones of each length."""
    sets = ("BCDFGHKLMNPRSTVWZ", "AEIOU")
    start = rng.randrange(2)
    return "".join(rng.choice(sets[(start + i) % 2]) for i in range(rng.randint(shortest, longest)))


def add(rng: random.Random) -> Problem:
    """The sum of two numbers from 0 to 59."""
    a, b = rng.randrange(60), rng.randrange(60)
    return _problem("add", a + b, a=a, b=b)


def subtract(rng: random.Random) -> Problem:
    """The difference of two numbers from 0 to 79, never negative."""
    a, b = sorted((rng.randrange(80), rng.randrange(80)), reverse=True)
    return _problem("subtract", a - b, a=a, b=b)


def larger(rng: random.Random) -> Problem:
    """The larger of two different numbers below 100."""
    a, b = rng.sample(range(100), 2)
    return _problem("larger", max(a, b), a=a, b=b, options=[str(a), str(b)])


def largest(rng: random.Random) -> Problem:
    """The largest of four different numbers below 100."""
    options = [str(number) for number in rng.sample(range(100), 4)]
    return _problem("largest", max(options, key=int), listed=" ".join(options), options=options)


def sort_numbers(rng: random.Random) -> Problem:
    """Five digits in ascending order, separated by spaces."""
    digits = [rng.randrange(10) for _ in range(5)]
    return _problem("sort_numbers", " ".join(map(str, sorted(digits))), listed=" ".join(map(str, digits)))


def sort_letters(rng: random.Random) -> Problem:
    """Five different letters in alphabetical order, written as one word."""
    letters = rng.sample("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 5)
    return _problem("sort_letters", "".join(sorted(letters)), word="".join(letters))


def reverse(rng: random.Random) -> Problem:
    """A word of four to six letters written backwards."""
    word = _pseudo_word(rng, 4, 6)
    return _problem("reverse", word[::-1], word=word)


def spell(rng: random.Random) -> Problem:
    """A word of four to six letters with a space between each two letters."""
    word = _pseudo_word(rng, 4, 6)
    return _problem("spell", " ".join(word), word=word)


def count_letter(rng: random.Random) -> Problem:
    """How often a letter occurs in a word of five to seven letters, at least once."""
    word = "".join(rng.choices(rng.sample("ABDEILMNORST", 3), k=rng.randint(5, 7)))
    letter = rng.choice(word)
    return _problem("count_letter", word.count(letter), word=word, letter=letter)


def count_letters(rng: random.Random) -> Problem:
    """The length of a word of three to nine letters."""
    word = _pseudo_word(rng, 3, 9)
    return _problem("count_letters", len(word), word=word)


def last_letter(rng: random.Random) -> Problem:
    """The last letter of a word of four to eight letters."""
    word = _pseudo_word(rng, 4, 8)
    return _problem("last_letter", word[-1], word=word)


def shift(rng: random.Random) -> Problem:
    """Each of three letters replaced by the next one of the alphabet."""
    word = "".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXY", k=3))
    return _problem("shift", "".join(chr(ord(c) + 1) for c in word), word=word)


def initials(rng: random.Random) -> Problem:
    """The first letters of three words, in capitals and without spaces."""
    words = rng.sample(WORDS, 3)
    return _problem("initials", "".join(w[0].upper() for w in words), listed=", ".join(words))


def repeat(rng: random.Random) -> Problem:
    """A word written two to five times, separated by spaces."""
    word, n = rng.choice(WORDS), rng.randint(2, 5)
    return _problem("repeat", " ".join([word] * n), word=word, n=n)


def parity(rng: random.Random) -> Problem:
    """Whether a number below 1000 is odd or even."""
    a = rng.randrange(1000)
    return _problem("parity", ("even", "odd")[a % 2], a=a, options=["even", "odd"])


def pick(rng: random.Random) -> Problem:
    """Which of three words is of a given kind (an animal, a fruit, a colour or a tool)."""
    kinds = rng.sample(sorted(KINDS), 3)
    answer, *_ = options = [rng.choice(KINDS[kind]) for kind in kinds]
    rng.shuffle(options)
    return _problem("pick", answer, kind=kinds[0], listed=_listed(options), options=options)


def between(rng: random.Random) -> Problem:
    """Whether a number below 100 is strictly between two others: yes or no, about equally often."""
    low, middle, high = sorted(rng.sample(range(100), 3))
    if rng.random() < 0.5:
        return _problem("between", "yes", a=middle, low=low, high=high, options=["yes", "no"])
    a, low, high = rng.choice([(low, middle, high), (high, low, middle)])
    return _problem("between", "no", a=a, low=low, high=high, options=["yes", "no"])


def rhyme(rng: random.Random) -> Problem:
    """Which of three words rhymes with a fourth."""
    group, *others = rng.sample(RHYMES, 3)
    word, answer = rng.sample(group, 2)
    options = [answer, *(rng.choice(other) for other in others)]
    rng.shuffle(options)
    return _problem("rhyme", answer, word=word, listed=_listed(options), options=options)


def next_number(rng: random.Random) -> Problem:
    """The fourth number of an arithmetic sequence whose first three are given."""
    start, step = rng.randrange(60), rng.randint(1, 9)
    return _problem("next_number", start + 3 * step, listed=" ".join(str(start + i * step) for i in range(3)))


def _listed(options: list[str]) -> str:
    return f"{', '.join(options[:-1])} or {options[-1]}"


FAMILIES: dict[str, Callable[[random.Random], Problem]] = {
    family.__name__: family
    for family in (
        add, subtract, larger, largest, sort_numbers, sort_letters, reverse, spell, count_letter, count_letters,
        last_letter, shift, initials, repeat, parity, pick, between, rhyme, next_number,
    )
}  # fmt: skip


def is_held_out(metadata: dict[str, Any]) -> bool:
    """Whether the small base never read this problem: one in eight, by a checksum of the metadata."""
    return zlib.crc32(json.dumps(metadata, sort_keys=True).encode()) % 8 == 0


def make_rows(family: str, n: int, seed: int, held_out: bool | None = None) -> list[dict[str, Any]]:
    """`n` problems, each `{"prompt", "answer", "family", ...metadata}`; equal arguments give equal rows.

    `held_out` keeps only the problems the small base never read (True), only the others (False), or both. No problem is
    repeated while the family has new ones. ValueError for an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown toy family {family!r}: choose one of {', '.join(FAMILIES)}")
    rng = random.Random(f"{family}/{seed}")
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    repeats_left = 1000 + 10 * n  # repeated problems to skip before the family counts as exhausted
    while len(rows) < n:
        prompt, answer, metadata = FAMILIES[family](rng)
        if held_out not in (None, is_held_out(metadata)):
            continue
        if prompt in seen and (repeats_left := repeats_left - 1) > 0:
            continue
        seen.add(prompt)
        rows.append({"prompt": prompt, "answer": answer, "family": family, **metadata})
    return rows
