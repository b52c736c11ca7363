"""Where dots and their labels go on a small map, so that peers of one place, or of neighbouring places, can be told apart. Pure; in inches."""

import math
from collections.abc import Sequence

Point = tuple[float, float]

DOT_IN = 0.115
"""Radius of a dot, with the room around it."""

CHAR_IN, LINE_IN = 0.076, 0.17
"""Of a label's text."""

ROUNDS = 200


def spread(points: Sequence[Point]) -> list[Point]:
    """Near `points`, no two dots over each other: whoever overlaps moves apart, half the way each, again and again."""
    found = [
        # those of the same place start around it, in their order
        (x + 0.01 * math.cos(2.4 * number), y + 0.01 * math.sin(2.4 * number))
        for number, (x, y) in enumerate(points)
    ]
    for _ in range(ROUNDS):
        moved = False
        for one in range(len(found)):
            for other in range(one):
                dx, dy = found[one][0] - found[other][0], found[one][1] - found[other][1]
                distance = math.hypot(dx, dy)
                if distance < 2.0 * DOT_IN - 1e-6:
                    push = (2.0 * DOT_IN - distance) / 2.0 / distance
                    found[one] = found[one][0] + push * dx, found[one][1] + push * dy
                    found[other] = found[other][0] - push * dx, found[other][1] - push * dy
                    moved = True
        if not moved:
            break
    return found


def on_a_circle(num: int, width: float, height: float, margin: float) -> list[Point]:
    """So many places evenly around an ellipse that leaves a margin at both sides, from the left clockwise; one alone is in the middle."""
    if num == 1:
        return [(width / 2, height / 2)]
    turns = [2.0 * math.pi * number / num for number in range(num)]
    across, up = width / 2 - margin, height / 2 - 4.0 * DOT_IN
    return [(width / 2 - across * math.cos(turn), height / 2 + up * math.sin(turn)) for turn in turns]


def in_a_column(counts: Sequence[int], x: float) -> tuple[list[Point], float]:
    """Places one above the other with room for so many dots and a label each, from the bottom up, and how high they are together."""
    places, top = [], 0.0
    for count in counts:
        room = 2.0 * LINE_IN + 2.4 * DOT_IN * math.ceil(math.sqrt(2 * count))
        places.append((x, top + room / 2 + LINE_IN / 2))
        top += room
    return places, top


def label_places(labels: Sequence[tuple[str, Sequence[Point]]], dots: Sequence[Point]) -> list[Point]:
    """For each (text, its dots) the middle of its text: below them, above, right or left, where it covers least of dots and earlier labels."""
    taken: list[tuple[float, float, float, float]] = [(x - DOT_IN, y - DOT_IN, x + DOT_IN, y + DOT_IN) for x, y in dots]
    found = []
    for text, its in labels:
        west, east = min(x for x, _ in its) - DOT_IN, max(x for x, _ in its) + DOT_IN
        south, north = min(y for _, y in its) - DOT_IN, max(y for _, y in its) + DOT_IN
        half = CHAR_IN * len(text) / 2
        middle, level = (west + east) / 2, (south + north) / 2
        choices = [
            (middle, south - 0.6 * LINE_IN),
            (middle, north + 0.6 * LINE_IN),
            (east + half + 0.04, level),
            (west - half - 0.04, level),
        ]
        boxes = [(x - half, y - LINE_IN / 2, x + half, y + LINE_IN / 2) for x, y in choices]
        covered = [sum(_common(box, other) for other in taken) for box in boxes]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        found.append(choices[best])
    return found


def _common(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    """Area that two boxes (west, south, east, north) share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
