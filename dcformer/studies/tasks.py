"""Small tasks about who owns, likes or does what, as the authors of arXiv 2405.08553 have: drawn by chance, fixed by a seed.

A line states facts, between < and >, and asks something; the answer, in brackets, ends it. A text has a few lines of one
family: the first of them, without brackets, show what is asked. All words follow a space, so that a word is the same tokens
everywhere.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from dcformer.studies.brackets import without_brackets
from dcformer.studies.words import ORDERS, Split, Words, all_words, words

SHOTS = 2
LINES = 8
# One line in so many, with those of the same words in another order, is kept from training, for "seen": new questions about
# words that training has.
_SEEN = 16
_LEXICON_SHARE = 4  # one text of training in so many says what the words are
_FACTS = (1, 1, 2, 3)  # how many the lines of a text of training have, drawn from these; those of other splits have the most


class Family(NamedTuple):
    """A kind of question.

    Attributes:
        name: of the family.
        line: draws a line, with so many facts, or as many more as its question needs.
    """

    name: str
    line: Callable[[random.Random, Words, int], str]


class _Domain(NamedTuple):
    """How facts and questions about a group of words read; X a name, t a thing with its article, `the` without, k a kind.

    Attributes:
        facts: two ways to say that X has t.
        asked: the question, by who or what is asked for and whether a thing or its kind is named.
    """

    facts: tuple[str, str]
    asked: dict[tuple[str, str], str]


_THINGS = _Domain(
    ("{X} owns {t}.", "{The} belongs to {X}."),
    {
        ("what", "kind"): "{X} owns a kind of [ {k} ]",
        ("what", "thing"): "{X} owns the [ {t} ]",
        ("what not", "kind"): "{X} lacks a kind of [ {k} ]",
        ("what not", "thing"): "{X} lacks the [ {t} ]",
        ("who", "kind"): "A kind of {k} is in the hands of [ {X} ]",
        ("who", "thing"): "The {t} is in the hands of [ {X} ]",
        ("who not", "kind"): "No kind of {k} is in the hands of [ {X} ]",
        ("who not", "thing"): "No {t} is in the hands of [ {X} ]",
    },
)
_CITIES = _Domain(
    ("{X} likes {t}.", "{The} attracts {X}."),
    {
        ("what", "kind"): "{X} dreams of a city in [ {k} ]",
        ("what", "thing"): "{X} dreams of [ {t} ]",
        ("what not", "kind"): "{X} cares for no city in [ {k} ]",
        ("what not", "thing"): "{X} does not care for [ {t} ]",
        ("who", "kind"): "The one who dreams of a city in {k} is [ {X} ]",
        ("who", "thing"): "The one who dreams of {t} is [ {X} ]",
        ("who not", "kind"): "The one who cares for no city in {k} is [ {X} ]",
        ("who not", "thing"): "The one who does not care for {t} is [ {X} ]",
    },
)


def families() -> dict[str, Family]:
    """All kinds of questions, by name."""
    found = []
    for domain_name, domain in (("own", _THINGS), ("like", _CITIES)):
        for asked, level in domain.asked:
            for form in (0, 1):
                name = f"{domain_name}: {asked}, {level}{', inverted' if form else ''}"
                found.append(Family(name, _relation(domain, asked, level, form)))
        for level in ("thing", "kind"):
            found.append(Family(f"{domain_name}: odd one out, {level}", _odd_one(domain, level)))
    for asked in ("when", "who"):
        for form in (0, 1):
            name = f"arrive: {asked}, one later{', inverted' if form else ''}"
            found.append(Family(name, _order(asked, form)))
    return {family.name: family for family in found}


def texts(split: Split, count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Texts of all families in turn: of each the family's name and the text, in the format of the authors' tasks.

    No line is in two splits, nor are two of the same words in another order. Lines have three facts, in most texts of training
    fewer: who cannot find the one fact yet learns nothing from three.

    Args:
        split: "train"; "seen", other lines with the same words; "unseen", lines with other names, things and cities.
        count: how many.
        seed: other seeds give other texts.

    Raises:
        ValueError: the split is unknown.
    """
    if split not in ("train", "seen", "unseen"):
        raise ValueError(f'split={split!r} is unknown; choose "train", "seen" or "unseen"')
    known, vocabulary = list(families().values()), words(split)
    for index in range(count):
        family, rng = known[index % len(known)], random.Random(f"{seed} {split} {index}")
        facts = rng.choice(_FACTS) if split == "train" else max(_FACTS)
        lines = [_line(family, rng, vocabulary, split, facts) for _ in range(LINES)]
        lines[:SHOTS] = [without_brackets(line) for line in lines[:SHOTS]]
        yield family.name, "\n" + "\n".join(lines) + "\n"


def training_texts(count: int, seed: int = 0) -> Iterator[str]:
    """What models train on: tasks of "train" without brackets, and between them what all words are, those of "unseen" too.

    Without the latter nobody could know that an unseen thing is a fruit, or would ever say an unseen name.
    """
    tasks, lexicon = texts("train", count, seed), _lexicon(random.Random(f"{seed} lexicon"))
    for index in range(count):
        if index % _LEXICON_SHARE == 0:
            yield "\n" + "\n".join(islice(lexicon, LINES)) + "\n"
        else:
            yield without_brackets(next(tasks)[1])


def _line(family: Family, rng: random.Random, vocabulary: Words, split: Split, facts: int) -> str:
    while True:
        line = family.line(rng, vocabulary, facts)
        in_order = " ".join(sorted(re.findall(r"\w+", line)))
        kept = hashlib.sha256(in_order.encode()).digest()[0] % _SEEN == 0
        if split == "unseen" or kept == (split == "seen"):
            return line


def _lexicon(rng: random.Random) -> Iterator[str]:
    """What each word is, all of them once before one comes again, without an end."""
    vocabulary = all_words()
    lines = [f"< This is {name}. > This is {name}" for name in vocabulary.names]
    lines += [
        f"< This is {_article(t)}. > This is a kind of {kind}" for kind, these in vocabulary.things.items() for t in these
    ]
    lines += [
        f"< This is {city}. > This is a city in {country}" for country, these in vocabulary.cities.items() for city in these
    ]
    while True:
        yield from rng.sample(lines, len(lines))


def _article(thing: str) -> str:
    return f"{'an' if thing[0] in 'aeiou' else 'a'} {thing}"


def _groups(domain: _Domain, vocabulary: Words) -> dict[str, list[str]]:
    return vocabulary.things if domain is _THINGS else vocabulary.cities


def _relation(domain: _Domain, asked: str, level: str, form: int) -> Callable[[random.Random, Words, int], str]:
    def line(rng: random.Random, vocabulary: Words, count: int) -> str:
        groups = _groups(domain, vocabulary)
        kinds = rng.sample(sorted(groups), 3)
        owners = rng.sample(vocabulary.names, 3)
        things = [rng.choice(groups[kind]) for kind in kinds]
        # The first fact is the one that answers.
        if asked == "what not":  # one has the other two things
            owners[1] = owners[2]
        elif asked == "who not":  # both others have the thing, or things of the kind
            kinds[1] = kinds[2]
            things[1:] = [things[2]] * 2 if level == "thing" else rng.sample(groups[kinds[2]], 2)
        about = 2 if asked == "who not" else 0
        person = owners[2] if asked == "what not" else owners[0]
        question = domain.asked[asked, level].format(X=person, k=kinds[about], t=things[about])
        facts = [_fact(domain, form, owner, thing) for owner, thing in zip(owners, things, strict=True)]
        facts = facts[: max(count, 2 if "not" in asked else 1)]
        rng.shuffle(facts)
        return f"< {' '.join(facts)} > {question}"

    return line


def _fact(domain: _Domain, form: int, owner: str, thing: str) -> str:
    is_thing = domain is _THINGS
    return domain.facts[form].format(
        X=owner, t=_article(thing) if is_thing else thing, The=f"The {thing}" if is_thing else thing
    )


def _odd_one(domain: _Domain, level: str) -> Callable[[random.Random, Words, int], str]:
    def line(rng: random.Random, vocabulary: Words, _: int) -> str:
        groups = _groups(domain, vocabulary)
        kinds = rng.sample(sorted(groups), 2)
        odd, twin = (rng.choice(groups[kind]) for kind in kinds)
        shown = [odd, twin, twin]
        rng.shuffle(shown)
        listed = ", ".join(_article(word) if domain is _THINGS else word for word in shown)
        if level == "thing":
            return f"< Look at {listed}. > The odd one is [ {odd} ]"
        return f"< Look at {listed}. > The odd one is {'a kind of' if domain is _THINGS else 'in'} [ {kinds[0]} ]"

    return line


def _order(asked: str, form: int) -> Callable[[random.Random, Words, int], str]:
    def line(rng: random.Random, vocabulary: Words, count: int) -> str:
        unit = rng.choice(sorted(ORDERS))
        times, people = ORDERS[unit], rng.sample(vocabulary.names, 3)
        when = rng.sample(range(len(times)), 3)
        word = "on" if unit == "day" else "in"
        facts = [
            f"{word.capitalize()} {times[t]} came {person}." if form else f"{person} came {word} {times[t]}."
            for person, t in zip(people[:count], when, strict=False)
        ]
        later = times[(when[0] + 1) % len(times)]
        rng.shuffle(facts)
        question = (
            f"One {unit} after {people[0]} it was [ {later} ]"
            if asked == "when"
            else f"One {unit} before {later} came [ {people[0]} ]"
        )
        return f"< {' '.join(facts)} > {question}"

    return line
