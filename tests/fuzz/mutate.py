"""Changes to good traffic. Pure: the same random numbers give the same case."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

NUMBERS = [-1, 0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**12, 10**18]
FLOATS = [0.0, -0.0, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"), -1.5]
TEXTS = [
    "",
    "\x00",
    "\ud7ff",
    "a" * 300,
    "../" * 20,
    "{{7*7}}",
    "\r\n\r\n",
    "🙂" * 50,
    "-1",
    "null",
    "tcp://127.0.0.1:1",
]


def value(rng: random.Random, *, big: bool = True) -> Any:
    """A value that few expect. `big`: also ones of some hundred kilobytes."""
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice([None, True, False, [], {}, [None], {"": None}]),
        lambda: rng.randbytes(rng.choice([0, 1, 16, 33])).hex(),
        lambda: nested(rng.choice([3, 40, 600])),
        lambda: [rng.choice(NUMBERS) for _ in range(rng.choice([1, 17, 300]))],
    ]
    if big and rng.random() < 0.05:
        kinds = [lambda: "x" * rng.choice([10**4, 3 * 10**5]), lambda: [None] * rng.choice([10**4, 10**5])]
    return rng.choice(kinds)()


def nested(depth: int) -> Any:
    """A list in a list in a list."""
    out: Any = []
    for _ in range(depth):
        out = [out]
    return out


def structure(rng: random.Random, good: Any) -> Any:
    """`good`, made of lists, dicts and scalars, with one to four of its parts replaced, removed, repeated or swapped."""
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        good = _changed(rng, good)
    return good


def _changed(rng: random.Random, node: Any) -> Any:
    if not isinstance(node, list | tuple | dict) or not node or rng.random() < 0.15:
        return value(rng)
    if isinstance(node, dict):
        out, key = dict(node), rng.choice(list(node))
        action = rng.random()
        if action < 0.6:
            out[key] = _changed(rng, out[key])
        elif action < 0.75:
            del out[key]
        elif action < 0.9:
            out[rng.choice([*TEXTS, str(key) + "x"])] = value(rng)
        else:
            out[key] = out[rng.choice(list(node))]
        return out
    items, at = list(node), rng.randrange(len(node))
    action = rng.random()
    if action < 0.6:
        items[at] = _changed(rng, items[at])
    elif action < 0.75:
        del items[at]
    elif action < 0.9:
        items.insert(at, value(rng))
    else:
        items += items[at:] * rng.choice([1, 3, 50])
    return items


def raw(rng: random.Random, good: bytes) -> bytes:
    """`good` with bits flipped, parts cut out, repeated, inserted or overwritten."""
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                del data[at : at + rng.choice([1, 2, 8, 100])]
            case 2:
                data[at:at] = rng.randbytes(rng.choice([1, 4, 30]))
            case 3:
                data[at : at + 4] = rng.choice([b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"])
            case 4:
                data[at:at] = data[at : at + 200] * rng.choice([1, 5])
            case _:
                del data[at:]
    return bytes(data)
