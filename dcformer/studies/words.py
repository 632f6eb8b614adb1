"""Names, things of kinds and cities of countries that synthetic tasks are about, split into those to learn with and others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "seen", "unseen"]

_NAMES = """
Ada Adrian Agnes Alina Amir Anton Astrid Bela Bianca Bruno Carla Celine Clara Cosmo Dario Dora Edgar Elias Elin Emil Enzo Erik
Esther Felix Fiona Frida Gabor Greta Gustav Hanna Henrik Hugo Ida Igor Ines Iris Ivan Jakob Jana Jasper Jonas Judit Karim Kasper
Lena Leo Lidia Linus Livia Lorenz Luca Magda Malik Marco Marta Matteo Mila Milan Mona Nadia Nils Nora Olaf Olga Omar Oscar Otto
Paula Pavel Petra Rafael Rahel Rosa Rudi Sami Selma Silas Sofia Stella Sven Tamara Theo Thora Tomas Ulla Vera Viktor Wanda Zoe
"""

# Each can be counted, so that "a" or "an" goes before it.
_KINDS = {
    "fruit": "apricot banana cherry fig grape lemon melon orange peach pear plum quince",
    "animal": "badger camel cow deer donkey fox goat hare horse lion otter wolf",
    "bird": "crow dove eagle falcon finch hawk heron owl parrot robin stork swan",
    "tool": "axe chisel drill file hammer hoe rake saw shovel spade wrench plane",
    "vehicle": "bicycle boat bus canoe car ferry lorry sledge tractor train tram van",
    "garment": "apron belt blouse cap cloak coat glove jacket scarf shirt skirt vest",
    "instrument": "accordion banjo cello drum flute guitar harp lute oboe piano trumpet violin",
    "dish": "casserole curry omelette pancake pie pizza pudding salad sandwich soup stew waffle",
    "drink": "beer cider cocktail cocoa coffee juice lemonade milkshake punch smoothie tea wine",
    "flower": "aster daisy lupin lily lotus orchid pansy peony poppy rose tulip violet",
    "furnishing": "armchair bed bench bookcase chair cupboard desk lamp shelf sofa stool table",
    "gem": "agate amber beryl diamond emerald garnet jade opal pearl ruby sapphire topaz",
}

_COUNTRIES = {
    "Austria": "Vienna Graz Linz Salzburg Innsbruck Klagenfurt",
    "Denmark": "Copenhagen Aarhus Odense Aalborg Esbjerg Randers",
    "Egypt": "Cairo Alexandria Giza Luxor Aswan Suez",
    "Finland": "Helsinki Tampere Turku Oulu Lahti Kuopio",
    "Greece": "Athens Patras Volos Larissa Sparta Corinth",
    "Hungary": "Budapest Szeged Pecs Debrecen Eger Sopron",
    "Kenya": "Nairobi Mombasa Kisumu Nakuru Eldoret Thika",
    "Norway": "Oslo Bergen Trondheim Stavanger Narvik Hamar",
    "Peru": "Lima Cusco Arequipa Trujillo Tacna Puno",
    "Poland": "Warsaw Krakow Gdansk Poznan Lublin Lodz",
    "Portugal": "Lisbon Porto Braga Coimbra Faro Evora",
    "Sweden": "Stockholm Uppsala Malmo Lund Kiruna Visby",
}

_ORDERS = {
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January February March April May June July August September October November December",
}
ORDERS = {unit: times.split() for unit, times in _ORDERS.items()}

# Every third word is kept from the tasks of training.
_PERIOD = 3


@dataclass(frozen=True)
class Words:
    """What tasks may be about.

    Attributes:
        names: of people.
        things: by kind.
        cities: by country.
    """

    names: list[str]
    things: dict[str, list[str]]
    cities: dict[str, list[str]]


def words(split: Split) -> Words:
    """Of training ("train", "seen": the same), or names, things and cities that no task of training has ("unseen").

    Kinds, countries, days and months are the same in all: they are what is asked for.
    """
    return Words(_part(_NAMES.split(), split), _parts(_KINDS, split), _parts(_COUNTRIES, split))


def all_words() -> Words:
    """Of all splits together."""
    return Words(_NAMES.split(), {k: v.split() for k, v in _KINDS.items()}, {k: v.split() for k, v in _COUNTRIES.items()})


def _part(these: list[str], split: Split) -> list[str]:
    return [word for i, word in enumerate(these) if (i % _PERIOD == _PERIOD - 1) == (split == "unseen")]


def _parts(groups: dict[str, str], split: Split) -> dict[str, list[str]]:
    return {group: _part(these.split(), split) for group, these in groups.items()}
