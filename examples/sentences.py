"""Two hundred plain sentences: forty beginnings, each with five endings."""

from __future__ import annotations

BEGINNINGS = (
    "My neighbour", "The night train", "A flock of geese", "Our old teacher", "The bakery on the corner",
    "A letter from Lisbon", "The youngest of the three sisters", "This bridge", "The committee", "An unknown violinist",
    "Heavy rain", "The museum's new wing", "A tired goalkeeper", "The village doctor", "Somebody in the back row",
    "The price of copper", "A small spacecraft", "The translation", "Her second novel", "The ferry to the islands",
    "A broken clock", "The winter harvest", "One of the engineers", "The mayor's brother", "A stray cat",
    "The committee's first report", "An orchard of plum trees", "The last lecture", "A red umbrella", "The choir",
    "Their favourite recipe", "The satellite", "A careful accountant", "The river", "The lighthouse keeper",
    "A crowded tram", "The experiment", "His grandmother's piano", "The border crossing", "A rumour",
)  # fmt: skip
ENDINGS = (
    "arrived later than anybody had expected.",
    "was mentioned twice in this morning's newspaper.",
    "reminded us of a summer we spent by the sea.",
    "is the reason why the meeting was cancelled.",
    "will not be forgotten soon, I think.",
)

SENTENCES = tuple(f"{beginning} {ending}" for beginning in BEGINNINGS for ending in ENDINGS)
