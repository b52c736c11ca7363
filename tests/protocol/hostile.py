"""Messages that nobody honest sends: anything that the wire's types let through, with extremes wherever there are any, drawn from a seed."""

import random
import string
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MOST_ITEMS = 3
"""Of what may have any number of them: it is the values that are strange here, and sizes the decoder's tests have."""


class Liar:
    """Draws messages. Whatever is known of the swarm may be put where it fits: keys and digests, heights and numbers of samples."""

    def __init__(self, seed: int, *, words: Sequence[bytes] = (), numbers: Sequence[int] = ()) -> None:
        self._rng = random.Random(seed)
        self._words, self._numbers = list(words), list(numbers)

    def say(self, kind: type[T]) -> T:
        """A message of a kind, or of one of a union's."""
        [about] = msgspec.inspect.multi_type_info([kind])
        while True:
            try:
                said: T = msgspec.convert(self._draw(about), kind)
            except msgspec.ValidationError:  # a rule of the type that no annotation has
                continue
            return said

    def spoil(self, message: Any, kind: type[T]) -> T | None:
        """What somebody honest said, with a value or some replaced; None where the wire's types do not let that through."""
        tree = msgspec.to_builtins(message, builtin_types=(bytes,))
        for _ in range(self._rng.choice([1, 1, 2, 4])):
            places = list(_places(tree))
            if places:
                holder, index = self._rng.choice(places)
                holder[index] = self._instead(holder[index])
        try:
            said: T = msgspec.convert(tree, kind)
        except msgspec.ValidationError:
            return None
        return said

    def _instead(self, value: Any) -> Any:
        rng = self._rng
        match value:
            case bool() | None:
                return rng.choice([True, False, None])
            case int():
                return rng.choice([value + 1, value - 1, 0, 1, 2, 1 << 16, 1 << 32, 1 << 61, 1 << 62, *self._numbers])
            case float():
                return rng.choice([0.0, 5e-324, 1e-300, 1e-9, 1e-3, 1.0, 1e7, 1e15, 1e300])
            case bytes():
                return rng.choice([b"", rng.randbytes(len(value)), *self._words])
            case str():
                return rng.choice(["", "a", "a" * 300])
            case list() if value:
                one = rng.choice(value)
                return rng.choice([[], value[1:], value[::-1], [*value, one], [one] * 3])
        return value

    def _draw(self, about: msgspec.inspect.Type) -> Any:
        rng = self._rng
        match about:
            case msgspec.inspect.Metadata():
                return self._draw(about.type)
            case msgspec.inspect.StructType():
                tag = [] if about.tag is None else [about.tag]
                drawn = [self._draw(field.type) for field in about.fields]
                return [*tag, *drawn]
            case msgspec.inspect.UnionType():
                return self._draw(rng.choice(about.types))
            case msgspec.inspect.NamedTupleType():
                return [self._draw(field.type) for field in about.fields]
            case msgspec.inspect.TupleType():
                return [self._draw(item) for item in about.item_types]
            case msgspec.inspect.VarTupleType():
                most = MOST_ITEMS if about.max_length is None else min(MOST_ITEMS, about.max_length)
                return [self._draw(about.item_type) for _ in range(rng.randint(about.min_length or 0, most))]
            case msgspec.inspect.IntType():
                low, high = about.ge, about.le if about.lt is None else about.lt - 1
                least = -(1 << 62) if low is None else low
                most = 1 << 62 if high is None else high
                likely = [n for n in (*self._numbers, 0, 1, 2, 3, 64, 4096) if least <= n <= most]
                return rng.choice([least, most, most - 1, (least + most) // 2, *likely, *likely])
            case msgspec.inspect.FloatType():
                least = -1.7e308 if about.ge is None else about.ge
                most = 1.7e308 if about.le is None else about.le
                likely = [f for f in (0.0, 5e-324, 1e-300, 1e-9, 1.0, 30.0, 1e6) if least <= f <= most]
                return float(rng.choice([least, most, *likely]))
            case msgspec.inspect.BytesType():
                least, most = about.min_length or 0, 64 if about.max_length is None else about.max_length
                known = [word for word in self._words if least <= len(word) <= most]
                if known and rng.random() < 0.9:
                    return rng.choice(known)
                return rng.randbytes(rng.choice([least, min(most, 64)]))
            case msgspec.inspect.StrType():
                most = 40 if about.max_length is None else about.max_length
                letters = string.ascii_lowercase + "._-"
                return "".join(rng.choice(letters) for _ in range(rng.choice([0, 1, most])))
            case msgspec.inspect.LiteralType():
                return rng.choice(about.values)
            case msgspec.inspect.EnumType():
                return rng.choice(list(about.cls)).value
            case msgspec.inspect.BoolType():
                return rng.random() < 0.5
            case msgspec.inspect.NoneType():
                return None
        raise TypeError(f"no way to draw {about}")


def _places(tree: Any) -> Iterator[tuple[list[Any], int]]:
    """Of all values, but for the tag that says what it is."""
    if isinstance(tree, list):
        for index, one in enumerate(tree):
            yield tree, index
            yield from _places(one)
