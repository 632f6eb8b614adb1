import hashlib
import itertools
import os
import re
import subprocess
import sys

import pytest

from dcformer.studies.brackets import task, without_brackets
from dcformer.studies.tasks import LINES, SHOTS, families, texts, training_texts
from dcformer.studies.words import ORDERS, all_words, words

EVERYTHING = all_words()
KIND = {t: kind for kinds in (EVERYTHING.things, EVERYTHING.cities) for kind, these in kinds.items() for t in these}


def lines_of(split, count, seed=0):
    return [line for _, text in texts(split, count, seed) for line in without_brackets(text).split("\n")[1:-1]]


def vocabulary(split):
    found = words(split)
    return {*found.names, *itertools.chain(*found.things.values(), *found.cities.values())}


def parse(facts):
    """Who has which things, or came when."""
    found = []
    for fact in re.findall(r"[^.]+(?=\.)", facts):
        for pattern, owner_first in (
            (r"(\w+) (?:owns an?|likes|came (?:on|in)) (\w+)", True),
            (r"(?:The )?(\w+) (?:belongs to|attracts) (\w+)", False),
            (r"(?:On|In) (\w+) came (\w+)", False),
        ):
            if match := re.fullmatch(pattern, fact.strip()):
                found.append(match.groups() if owner_first else match.groups()[::-1])
    return found


def solve(line):
    """All answers that a line has, found by another way than it was made."""
    facts, question = line.removeprefix("< ").split(" > ")
    if facts.startswith("Look at"):
        shown = [part.split()[-1] for part in facts.removesuffix(".").split(", ")]
        odd = [word for word in shown if shown.count(word) == 1]
        return odd if question.startswith("The odd one is [") else [KIND[word] for word in odd]
    has = parse(facts)
    if match := re.match(r"One (\w+) after (\w+) it was", question):
        times = ORDERS[match[1]]
        return [times[(times.index(time) + 1) % len(times)] for person, time in has if person == match[2]]
    if match := re.match(r"One (\w+) before (\w+) came", question):
        times = ORDERS[match[1]]
        return [person for person, time in has if times[(times.index(time) + 1) % len(times)] == match[2]]
    negative = any(word in question for word in ("lacks", "cares for no", "does not care", "No "))
    kinds = "kind" in question or "city in" in question
    named = [(person, KIND[thing] if kinds else thing) for person, thing in has]
    asked = question.partition("[")[0].split()
    people, things = {person for person, _ in named}, {thing for _, thing in named}
    if asked[0] in people:
        theirs = {thing for person, thing in named if person == asked[0]}
        return sorted(things - theirs if negative else theirs)
    (thing,) = [word for word in asked if word in things]
    theirs = {person for person, what in named if what == thing}
    return sorted(people - theirs if negative else theirs)


def test_each_answer_is_the_only_one(seed):
    for split in ("train", "seen", "unseen"):
        for family, text in texts(split, 3 * len(families()), seed):
            for line in text.split("\n")[1 + SHOTS : -1]:
                assert solve(line) == re.findall(r"\[ (.*?) \]", line), (family, line)


def test_lines_have_three_facts_and_fewer_in_training(seed):
    counts = {split: {line.count(". ") for line in lines_of(split, 200, seed)} for split in ("train", "seen", "unseen")}
    assert counts == {"train": {1, 2, 3}, "seen": {1, 3}, "unseen": {1, 3}}  # the odd one out is among words of one fact


def test_texts_have_the_form_of_the_authors_tasks():
    known = families()
    assert len(known) >= 20
    for family, text in texts("seen", len(known)):
        lines = text.split("\n")
        assert lines[0] == lines[-1] == "" and len(lines) == LINES + 2
        assert [line.count("[ ") for line in lines[1:-1]] == [0] * SHOTS + [1] * (LINES - SHOTS)
        assert len(task(family, text).answers) == LINES - SHOTS
    assert [family for family, _ in texts("seen", len(known))] == list(known)


def test_the_same_seed_gives_the_same_texts_in_every_process(seed):
    code = (
        "import hashlib; from dcformer.studies.tasks import texts, training_texts; "
        f"print(hashlib.sha256(repr([*texts('unseen', 50, {seed}), *training_texts(50, {seed})]).encode()).hexdigest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    here = repr([*texts("unseen", 50, seed), *training_texts(50, seed)])
    assert done.stdout.strip() == hashlib.sha256(here.encode()).hexdigest()
    assert list(texts("train", 50, seed)) != list(texts("train", 50, seed + 1))
    assert list(texts("train", 50, seed)) == list(texts("train", 80, seed))[:50]


def test_no_line_is_in_two_splits_nor_in_another_order(seed):
    """Of odd-one-out tasks there are few enough that chance would let many meet."""

    def forms(split, count, seed):
        return {tuple(sorted(re.findall(r"\w+", line))) for line in lines_of(split, count, seed)}

    train, seen, unseen = (forms(split, 800, seed) for split in ("train", "seen", "unseen"))
    assert not train & seen and not train & unseen and not seen & unseen
    assert not forms("seen", 500, seed + 1) & train


def test_tasks_of_training_have_no_unseen_word(seed):
    held_out = vocabulary("unseen")
    assert not vocabulary("train") & held_out and vocabulary("train") == vocabulary("seen")
    assert vocabulary("train") | held_out == {*EVERYTHING.names, *KIND}
    for group in (words("unseen").things, words("unseen").cities):
        assert all(len(these) >= 2 for these in group.values())
    for split in ("train", "seen"):
        assert not held_out & set(re.findall(r"\w+", "\n".join(lines_of(split, 1000, seed))))
    kinds = {*EVERYTHING.things, *EVERYTHING.cities}
    used = set(re.findall(r"\w+", "\n".join(lines_of("unseen", 1000, seed))))
    assert used & held_out and not used & vocabulary("train") - kinds


def test_training_says_of_unseen_words_only_what_they_are(seed):
    held_out, told = vocabulary("unseen"), set()
    for text in training_texts(600, seed):
        assert "[" not in text and text.startswith("\n") and text.endswith("\n")
        for line in text.split("\n")[1:-1]:
            if about := held_out & set(re.findall(r"\w+", line)):
                (word,) = about
                kind = KIND.get(word, word)
                assert re.fullmatch(rf"< This is (an? )?{word}\. > This is (a kind of |a city in )?{kind}", line)
                told |= about
    assert told == held_out


def test_no_word_has_two_meanings():
    things = list(itertools.chain(*EVERYTHING.things.values(), *EVERYTHING.cities.values()))
    everything = [
        *EVERYTHING.names,
        *things,
        *EVERYTHING.things,
        *EVERYTHING.cities,
        *ORDERS,
        *itertools.chain(*ORDERS.values()),
    ]
    assert len(everything) == len(set(everything))


def test_unknown_splits_are_refused():
    with pytest.raises(ValueError, match="split='test' is unknown"):
        next(texts("test", 1))
