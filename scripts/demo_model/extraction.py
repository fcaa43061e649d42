"""Chats of the demo corpus that are answered with a JSON object. Pure functions of a random generator."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from scripts.demo_model import tables as t
from scripts.demo_model.dialogues import Exchange
from scripts.demo_model.phrases import SIGN_WORDS, country, person_name, sum_terms


def _article(job: str) -> str:
    return f"an {job}" if job[0] in "aeiou" else f"a {job}"


def _person(rng: Random) -> tuple[str, dict[str, Any]]:
    """(text, what it says) of a person; the text need not have the order of the object."""
    name, age, job = person_name(rng), rng.randint(5, 95), rng.choice(t.JOBS)
    city = rng.choice(t.CITIES) if rng.random() < 0.7 else person_name(rng, 0.0)
    hobby, food = rng.choice(t.HOBBIES), rng.choice(t.FOODS)
    clauses = [
        ("age", age, f"is {age} years old"),
        ("city", city, rng.choice((f"lives in {city}", f"comes from {city}"))),
        ("job", job, f"is {_article(job)}"),
        ("hobby", hobby, f"likes {hobby}"),
        ("food", food, f"eats {food}"),
    ]
    chosen = clauses[:2] if rng.random() < 0.5 else rng.sample(clauses, rng.choice((1, 2, 2, 3)))
    said = [clause for _, _, clause in chosen]
    if rng.random() < 0.5:
        rng.shuffle(said)
    joined = ", ".join(said[:-1]) + (" and " if len(said) > 1 else "") + said[-1]
    return f"{name} {joined}.", {"name": name} | {key: value for key, value, _ in chosen}


def _about_a_person(rng: Random) -> Exchange:
    text, found = _person(rng)
    if rng.random() < 0.25:
        # The caller's schema may ask for less than the text says, and in another order.
        keys = rng.sample(list(found), rng.randint(1, len(found)))
        found = {key: found[key] for key in keys}
        order = f"Give {', '.join(keys)} as JSON"
    else:
        order = rng.choice(
            ("Extract the person as JSON", "Extract the person as JSON", "Extract the person", "As JSON")
        )
    asked = rng.choice((f"{order}: {text}", f"{order}: {text}", f"{text} {order}."))
    return asked, json.dumps(found, ensure_ascii=False)


def _people(rng: Random) -> Exchange:
    names = [person_name(rng) for _ in range(rng.choice((2, 2, 3)))]
    told = f"{', '.join(names[:-1])} and {names[-1]} {rng.choice(('are friends', 'came to dinner', 'met today'))}."
    return f"Extract the names as JSON: {told}", json.dumps({"names": names}, ensure_ascii=False)


def _known(rng: Random) -> Exchange:
    """A question whose answer the model knows."""
    order = rng.choice(("Answer as JSON.", "Answer in JSON.", "Give JSON."))
    if rng.random() < 0.5:
        place = country(rng)
        found: dict[str, Any] = {"country": place, "capital": t.CAPITALS[place]}
        if rng.random() < 0.3:
            found = {"capital": t.CAPITALS[place]}
        return f"What is the capital of {place}? {order}", json.dumps(found, ensure_ascii=False)
    a, sign, b, result = sum_terms(rng)
    asked = rng.choice((f"What is {a}{sign}{b}?", f"What is {a} {SIGN_WORDS[sign]} {b}?"))
    key = rng.choice(("answer", "result"))
    return f"{asked} {order}", json.dumps({key: result})


def extraction(rng: Random) -> list[tuple[str, str]]:
    """One chat as (role, content) messages: maybe a system message, then one or two exchanges."""
    messages: list[tuple[str, str]] = []
    if rng.random() < 0.25:
        messages.append(("system", rng.choice((*t.SYSTEM_PROMPTS, "Answer in JSON."))))
    makers = rng.choices((_about_a_person, _people, _known), (6.0, 1.0, 2.0), k=rng.choice((1, 1, 2)))
    for asked, answer in (maker(rng) for maker in makers):
        messages += [("user", asked), ("assistant", answer)]
    return messages
