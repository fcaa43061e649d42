"""Sentences of the demo corpus: facts, sums, introductions, stories. Pure functions of a random generator."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from scripts.demo_model import tables as t


def capitalised(text: str) -> str:
    """`text` with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def person_name(rng: Random, known: float = 0.5) -> str:
    """A name: from the table with probability `known`, else invented, so that a model learns to copy any name."""
    if rng.random() < known:
        return rng.choice(t.NAMES)
    return "".join(rng.choice(t.SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def country(rng: Random) -> str:
    """A country; the first ones of the table, which are asked for most, come up more often."""
    names = list(t.CAPITALS)
    return rng.choice(names[:14]) if rng.random() < 0.25 else rng.choice(names)


def sum_terms(rng: Random) -> tuple[int, str, int, int]:
    """(a, sign, b, result) of a sum, difference or product of small numbers; nothing is negative."""
    kind = rng.random()
    top = 10 if rng.random() < 0.85 else 20
    if kind < 0.6:
        a, b = rng.randint(0, top), rng.randint(0, top)
        return a, "+", b, a + b
    if kind < 0.9:
        a = rng.randint(0, top)
        b = rng.randint(0, a)
        return a, "-", b, a - b
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return a, "*", b, a * b


SIGN_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def capital_sentence(rng: Random) -> str:
    place = country(rng)
    city = t.CAPITALS[place]
    return rng.choice(
        (
            f"The capital of {place} is {city}.",
            f"The capital of {place} is {city}.",
            f"The capital of {place} is {city}.",
            f"{city} is the capital of {place}.",
            f"The capital city of {place} is {city}.",
            f"What is the capital of {place}? The capital of {place} is {city}.",
        )
    )


def sum_sentence(rng: Random) -> str:
    a, sign, b, result = sum_terms(rng)
    if result <= 20 and rng.random() < 0.1:
        words = t.NUMBER_WORDS
        return capitalised(f"{words[a]} {SIGN_WORDS[sign]} {words[b]} is {words[result]}.")
    tight, loose = f"{a}{sign}{b}", f"{a} {sign} {b}"
    return rng.choice(
        (
            f"The result of {tight} is {result}.",
            f"The result of {tight} is {result}.",
            f"The result of {loose} is {result}.",
            f"{loose} = {result}",
            f"{tight}={result}",
            f"{loose} is {result}.",
            f"{a} {SIGN_WORDS[sign]} {b} is {result}.",
            f"What is {tight}? The result of {tight} is {result}.",
        )
    )


def sums(rng: Random) -> str:
    """A few sums on one line; most of what a model learns of arithmetic comes from these."""
    return " ".join(sum_sentence(rng) for _ in range(rng.randint(2, 5)))


def counting(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.55:
        start, step = rng.choice((1, 1, 0, rng.randint(0, 30))), rng.choice((1, 1, 1, 2, 5, 10))
        return ", ".join(str(start + step * i) for i in range(rng.randint(6, 14)))
    if kind < 0.7:
        top = rng.randint(5, 20)
        return "Counting down: " + ", ".join(str(n) for n in range(top, -1, -1)) + "."
    start = rng.choice((1, 1, rng.randint(0, 8)))
    return capitalised(", ".join(t.NUMBER_WORDS[start : start + rng.randint(6, 12)])) + "."


def calendar(rng: Random) -> str:
    words, unit = (t.MONTHS, "month") if rng.random() < 0.5 else (t.DAYS, "day")
    i = rng.randrange(len(words))
    this, following = words[i], words[(i + 1) % len(words)]
    return rng.choice(
        (
            f"The {unit} after {this} is {following}.",
            f"The {unit} before {following} is {this}.",
            f"After {this} comes {following}.",
            f"The {unit}s are {', '.join(words[:-1])} and {words[-1]}.",
            ", ".join(words[i:] + words[:i]) + ".",
        )
    )


def opposite(rng: Random) -> str:
    one, other = rng.choice(list(t.OPPOSITES.items()))
    return rng.choice((f"The opposite of {one} is {other}.", f"{capitalised(one)} is the opposite of {other}."))


def colour(rng: Random) -> str:
    thing, shade = rng.choice(list(t.COLOURS_OF.items()))
    return rng.choice((f"{capitalised(thing)} is {shade}.", f"The colour of {thing} is {shade}."))


def animal(rng: Random) -> str:
    kind = rng.randrange(3)
    beast, answer = rng.choice(list((t.SOUNDS, t.YOUNG, t.LEGS)[kind].items()))
    if kind == 0:
        return rng.choice((f"The {beast} says {answer}.", f"A {beast} says {answer}."))
    if kind == 1:
        return rng.choice((f"A young {beast} is called a {answer}.", f"A baby {beast} is a {answer}."))
    article = "An" if beast[0] in "aeo" else "A"
    return f"{article} {beast} has {answer} legs."


def hello(rng: Random) -> str:
    language, word = rng.choice(list(t.HELLOS.items()))
    return rng.choice((f"Hello in {language} is {word}.", f"In {language} you say {word}!"))


def question_fact(rng: Random) -> str:
    question, answer = rng.choice(list(t.FACTS.items()))
    return rng.choice((answer, f"{question} {answer}"))


def introduction(rng: Random) -> str:
    name = person_name(rng, known=0.85)
    if rng.random() < 0.3:
        # One name leads clearly: the greedy continuation must not hang on rounding.
        name = rng.choice(t.NAMES[:2]) if rng.random() < 0.4 else t.NAMES[0]
    city, food, hobby, job = (rng.choice(words) for words in (t.CITIES, t.FOODS, t.HOBBIES, t.JOBS))
    start = rng.choice(("Hello, my name is", "Hello, my name is", "Hi, my name is", "My name is", "Hello, I am"))
    parts = [
        rng.choice((f"I live in {city}.", f"I come from {city}.")),
        rng.choice((f"I am a {job}." if job != "engineer" else "I am an engineer.", f"I like {hobby}.")),
        rng.choice((f"I like {food}.", f"My favourite colour is {rng.choice(t.COLOURS)}.")),
        f"I have a {rng.choice(t.PETS)} called {person_name(rng)}.",
        rng.choice(("Nice to meet you!", "What is your name?", f"I am {rng.randint(8, 80)} years old.")),
    ]
    kept = [part for part in parts if rng.random() < 0.45]
    if not kept:
        return f"{start} {name}."
    joined = " and " + kept[0] if kept[0].startswith("I ") and rng.random() < 0.5 else ". " + kept[0]
    return " ".join([f"{start} {name}{joined}", *kept[1:]])


def story(rng: Random, hero: str | None = None) -> str:
    """A short story of five to seven sentences about `hero`, or about anybody."""
    hero = hero or rng.choice(t.HEROES)
    friend = rng.choice([other for other in t.HEROES if other != hero])
    name, trait, place, thing = (
        person_name(rng, 0.8),
        rng.choice(t.ADJECTIVES),
        rng.choice(t.PLACES),
        rng.choice(t.THINGS),
    )
    article = "an" if trait[0] in "aeiou" else "a"
    opening = rng.choice(("Once upon a time, there was", "Once there was", "Long ago, there lived"))
    sentences = [
        f"{opening} {article} {trait} {hero} called {name}.",
        rng.choice((f"{name} lived near a {place}.", f"{name} lived in a small house by the {place}.")),
        rng.choice((f"One day, {name} found a {thing}.", f"One morning, {name} lost a {thing} and was very sad.")),
    ]
    if "found" in sentences[-1]:
        sentences += [
            f'"Whose {thing} is this?" asked {name}.',
            rng.choice(
                (
                    f'"It is mine," said the {friend}, "thank you!"',
                    f"A {friend} came and said that it was a magic {thing}.",
                )
            ),
        ]
    else:
        sentences += [
            rng.choice((f"A {friend} came to help.", f'"Do not cry," said a {friend}, "I will help you."')),
            f"They looked everywhere, and at last they found the {thing} under a tree.",
        ]
    sentences += [f"From that day on, {name} and the {friend} were best friends."]
    if rng.random() < 0.6:
        sentences.append(rng.choice(("And they lived happily ever after.", "The end.")))
    return " ".join(sentences)


FACT_KINDS: tuple[tuple[Callable[[Random], str], float], ...] = (
    (capital_sentence, 5.0),
    (sums, 6.0),
    (counting, 1.2),
    (calendar, 1.0),
    (opposite, 1.0),
    (colour, 0.8),
    (animal, 1.2),
    (hello, 0.6),
    (question_fact, 1.0),
)


def echo(rng: Random, most: int = 5) -> str:
    """A few random words: nothing in them can be foreseen, so that repeating them teaches to copy."""
    return " ".join(person_name(rng, 0.15) for _ in range(rng.randint(1, most)))


def passage(rng: Random) -> str:
    """One plain-text document: one to four facts, an introduction, a story or an echo."""
    kind = rng.random()
    if kind < 0.16:
        return introduction(rng)
    if kind < 0.26:
        return story(rng)
    if kind < 0.32:
        words = echo(rng)
        return f"{words}. {words}. {words}."
    makers = [maker for maker, _ in FACT_KINDS]
    weights = [weight for _, weight in FACT_KINDS]
    if rng.random() < 0.5:
        (maker,) = rng.choices(makers, weights)
        return " ".join(maker(rng) for _ in range(rng.randint(1, 4)))
    return " ".join(maker(rng) for maker in rng.choices(makers, weights, k=rng.randint(1, 4)))
