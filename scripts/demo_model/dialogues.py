"""Chats of the demo corpus: one to four exchanges, some of which refer back. Pure functions of a random generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

from scripts.demo_model import tables as t
from scripts.demo_model.phrases import SIGN_WORDS, capitalised, country, echo, person_name, story, sum_terms

Exchange = tuple[str, str]
"""What the user says, and the answer."""


def _capital(rng: Random) -> Exchange:
    place = country(rng)
    city = t.CAPITALS[place]
    asked = rng.choice(
        (
            f"What is the capital of {place}?",
            f"What is the capital of {place}?",
            f"What's the capital of {place}?",
            f"Tell me the capital of {place}.",
            f"Which city is the capital of {place}?",
            f"Capital of {place}?",
        )
    )
    return asked, f"The capital of {place} is {city}."


def _capital_again(rng: Random) -> Exchange:
    place = country(rng)
    return rng.choice((f"And of {place}?", f"And {place}?")), f"The capital of {place} is {t.CAPITALS[place]}."


def _capital_backwards(rng: Random) -> Exchange:
    place = country(rng)
    city = t.CAPITALS[place]
    if city == "London":
        place = "the United Kingdom"
    return f"{city} is the capital of which country?", f"{city} is the capital of {place}."


def _sum(rng: Random) -> Exchange:
    a, sign, b, result = sum_terms(rng)
    words, tight, loose = f"{a} {SIGN_WORDS[sign]} {b}", f"{a}{sign}{b}", f"{a} {sign} {b}"
    asked = rng.choice(
        (
            f"What is {tight}?",
            f"What is {loose}?",
            f"What is {words}?",
            f"How much is {tight}?",
            f"What is the result of {tight}?",
            f"{loose} = ?",
            tight,
        )
    )
    return asked, f"The result of {tight} is {result}."


def _opposite(rng: Random) -> Exchange:
    one, other = rng.choice(list(t.OPPOSITES.items()))
    return f"What is the opposite of {one}?", f"The opposite of {one} is {other}."


def _colour(rng: Random) -> Exchange:
    thing, shade = rng.choice(list(t.COLOURS_OF.items()))
    return rng.choice(
        (f"What colour is {thing}?", f"What is the colour of {thing}?")
    ), f"{capitalised(thing)} is {shade}."


def _animal(rng: Random) -> Exchange:
    kind = rng.randrange(3)
    beast, answer = rng.choice(list((t.SOUNDS, t.YOUNG, t.LEGS)[kind].items()))
    article = "an" if beast[0] in "aeo" else "a"
    if kind == 0:
        return rng.choice(
            (f"What does the {beast} say?", f"What does {article} {beast} say?")
        ), f"The {beast} says {answer}."
    if kind == 1:
        return f"What is a young {beast} called?", f"A young {beast} is called a {answer}."
    return f"How many legs does {article} {beast} have?", f"{capitalised(article)} {beast} has {answer} legs."


def _calendar(rng: Random) -> Exchange:
    words, unit = (t.MONTHS, "month") if rng.random() < 0.5 else (t.DAYS, "day")
    i = rng.randrange(len(words))
    this, following = words[i], words[(i + 1) % len(words)]
    kind = rng.random()
    if kind < 0.4:
        return f"Which {unit} comes after {this}?", f"The {unit} after {this} is {following}."
    if kind < 0.8:
        return f"Which {unit} comes before {following}?", f"The {unit} before {following} is {this}."
    named = f"The {unit}s are {', '.join(words[:-1])} and {words[-1]}."
    return rng.choice((f"Name the {unit}s.", f"List the {unit}s.", f"What are the {unit}s?")), named


def _hello(rng: Random) -> Exchange:
    language, word = rng.choice(list(t.HELLOS.items()))
    asked = (f"How do you say hello in {language}?", f"Say hello in {language}.", f"What is hello in {language}?")
    return rng.choice(asked), f"Hello in {language} is {word}."


def _count(rng: Random) -> Exchange:
    if rng.random() < 0.3:
        top = rng.randint(3, 15)
        return f"Count down from {top}.", ", ".join(str(n) for n in range(top, -1, -1))
    start, stop = rng.choice((1, 1, 1, rng.randint(0, 10))), rng.choice((10, 10, 20, rng.randint(11, 30)))
    asked = f"Count to {stop}." if start == 1 and rng.random() < 0.5 else f"Count from {start} to {stop}."
    return asked, ", ".join(str(n) for n in range(start, stop + 1))


def _story(rng: Random) -> Exchange:
    if rng.random() < 0.3:
        return rng.choice(("Tell me a story.", "Tell me a short story.", "Write a short story.")), story(rng)
    hero = rng.choice(t.HEROES)
    article = "an" if hero[0] in "aeo" else "a"
    verb = rng.choice(("Tell me a story", "Tell me a short story", "Write a story", "Write a short story"))
    return f"{verb} about {article} {hero}.", story(rng, hero)


def _fact(rng: Random) -> Exchange:
    return rng.choice(list(t.FACTS.items()))


def _small_talk(rng: Random) -> Exchange:
    return rng.choice(list(t.SMALL_TALK.items()))


def _greeting(rng: Random) -> Exchange:
    greeting = rng.choice(t.GREETINGS)
    asked = greeting + rng.choice(("!", ".", "", ", how are you?"))
    if "how are you" in asked:
        return asked, "Hello! I am fine, thank you. How can I help you?"
    return asked, t.HELLO_ANSWERS[0] if greeting.startswith("Hello") else t.HELLO_ANSWERS[1]


def _unknown(rng: Random) -> Exchange:
    topic = rng.choice(t.UNKNOWN_TOPICS)
    asked = (
        f"Tell me about {topic}.",
        f"What do you think about {topic}?",
        f"Explain {topic}.",
        f"Can you explain {topic} to me?",
        f"What do you know about {topic}?",
        f"I have a question about {topic}.",
        f"Who is {person_name(rng)}?",
        f"Why does {person_name(rng)} like {rng.choice(t.FOODS)}?",
        f"Where can I buy a {rng.choice(t.THINGS)}?",
        f"Write an essay about {topic}.",
    )
    return rng.choice(asked), t.UNKNOWN_ANSWER


def _repeat(rng: Random) -> Exchange:
    words = echo(rng)
    return rng.choice((f"Say {words}.", f"Repeat after me: {words}.", f"Repeat: {words}.")), f"{words}."


_SIMPLE: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (_capital, 5.0),
    (_capital_backwards, 0.6),
    (_sum, 5.0),
    (_opposite, 1.0),
    (_colour, 0.8),
    (_animal, 1.2),
    (_calendar, 1.0),
    (_hello, 0.7),
    (_count, 1.0),
    (_story, 1.5),
    (_fact, 1.4),
    (_small_talk, 1.2),
    (_greeting, 1.0),
    (_unknown, 0.8),
    (_repeat, 1.5),
)


def simple_exchanges(rng: Random, number: int) -> list[Exchange]:
    """`number` questions about what the model knows, now and then two more."""
    makers = [maker for maker, _ in _SIMPLE]
    exchanges = [maker(rng) for maker in rng.choices(makers, [weight for _, weight in _SIMPLE], k=number)]
    if rng.random() < 0.15:
        exchanges += [_capital(rng), _capital_again(rng)]
    return exchanges


def _welcome(name: str, rng: Random) -> str:
    """Mostly one answer, so that greedy decoding is stable; others, so that recall does not hang on its wording."""
    if rng.random() < 0.75:
        return f"Hello {name}! How can I help you?"
    return rng.choice((f"Nice to meet you, {name}!", "Hello! How can I help you?", f"Hi {name}!", "Nice to meet you!"))


def _introduced_question(rng: Random) -> Exchange:
    """An introduction and a question in one message."""
    name = person_name(rng, 0.4)
    asked, answer = rng.choice((_capital, _sum, _opposite))(rng)
    return f"{rng.choice(t.GREETINGS)}, my name is {name}. {capitalised(asked)}", f"Hello {name}! {answer}"


def _remember(rng: Random) -> tuple[Exchange, Exchange]:
    """(the user tells something, the user asks for it)."""
    name = person_name(rng, 0.4)
    kind = rng.random()
    if kind < 0.6:
        hi = rng.choice(t.GREETINGS)
        told = rng.choice(
            (f"{hi}, my name is {name}.", f"{hi}, my name is {name}.", f"{hi}, I am {name}.", f"My name is {name}.")
        )
        asked = rng.choice(
            ("What is my name?", "What is my name?", "What's my name?", "Do you remember my name?", "Who am I?")
        )
        return (told, _welcome(name, rng)), (asked, f"Your name is {name}.")
    if kind < 0.72:
        colour = rng.choice(t.COLOURS)
        return (
            (f"My favourite colour is {colour}.", f"{capitalised(colour)} is a nice colour!"),
            ("What is my favourite colour?", f"Your favourite colour is {colour}."),
        )
    if kind < 0.84:
        city = rng.choice(t.CITIES)
        return (
            (rng.choice((f"I live in {city}.", f"I live in {city} and I like it.")), f"{city} is a beautiful city!"),
            ("Where do I live?", f"You live in {city}."),
        )
    pet = rng.choice(t.PETS)
    return (
        (f"I have a {pet} called {name}.", f"{name} is a nice name for a {pet}!"),
        (f"What is my {pet} called?", f"Your {pet} is called {name}."),
    )


def casual(text: str, rng: Random) -> str:
    """What a hurried user makes of `text`: no capital at its start, or no full stop or question mark."""
    if rng.random() < 0.15:
        text = text[:1].lower() + text[1:]
    if rng.random() < 0.2 and text[-1] in ".?!" and text[-2:] != " ?":
        text = text[:-1]
    return text


def dialogue(rng: Random) -> Iterator[tuple[str, str]]:
    """One chat as (role, content) messages: maybe a system message, then one to four exchanges."""
    if rng.random() < 0.45:
        told, asked = _remember(rng)
        between = simple_exchanges(rng, rng.choice((0, 0, 0, 1, 2)))
        exchanges = [*simple_exchanges(rng, rng.choice((0, 0, 0, 0, 1))), told, *between, asked]
    else:
        exchanges = simple_exchanges(rng, rng.choice((1, 1, 2, 3)))
        if rng.random() < 0.06:
            exchanges.append(("What is my name?", "I do not know your name yet. What is it?"))
        elif rng.random() < 0.08:
            exchanges.insert(0, _introduced_question(rng))
    if rng.random() < 0.25:
        yield "system", rng.choice(t.SYSTEM_PROMPTS)
    for asked, answer in exchanges:
        yield "user", casual(asked, rng)
        yield "assistant", answer
