"""Chats of the demo corpus in which tools are offered, as OpenAI's API has them. Pure functions of a random generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from scripts.demo_model import tables as t
from scripts.demo_model.dialogues import Exchange, casual, simple_exchanges
from scripts.demo_model.phrases import country, echo, person_name

Message = dict[str, Any]
Tool = dict[str, Any]


class Use(NamedTuple):
    """A question, the arguments of the call in the order of the tool's parameters, its result and the answer."""

    asked: str
    arguments: list[Any]
    result: dict[str, Any]
    answer: str


class ToolOffer(NamedTuple):
    """A tool as one chat offers it, and how to make a question that needs it."""

    name: str
    description: str
    parameters: dict[str, str]
    """Their types by name, or their choices separated by bars."""
    use: Callable[[Random], Use]

    @property
    def schema(self) -> Tool:
        """The tool in OpenAI's form."""
        properties = {
            name: {"type": "string", "enum": kind.split("|")} if "|" in kind else {"type": kind}
            for name, kind in self.parameters.items()
        }
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


def _city(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(t.CITIES)
    return rng.choice(list(t.CAPITALS.values())) if kind < 0.75 else person_name(rng, 0.0)


def _function_name(noun: str, rng: Random) -> str:
    """A name that a tool about `noun` may have: so many that they cannot be known by heart, only copied."""
    if rng.random() < 0.25:
        return f"get_{noun}"
    first = rng.choice((*t.VERBS, *t.VERBS, person_name(rng, 0.0).lower()))
    return rng.choice((f"{first}_{noun}", f"{first}_{noun}", f"{noun}_{first}", f"{first}_the_{noun}", noun))


def _parameter_name(usual: tuple[str, ...], rng: Random) -> str:
    return rng.choice(usual) if rng.random() < 0.85 else person_name(rng, 0.0).lower()


def _place_name(rng: Random) -> str:
    return _parameter_name(("city", "city", "city", "location", "location", "place", "town"), rng)


def _weather(rng: Random) -> ToolOffer:
    name = _function_name("weather", rng)
    told = rng.choice(("Get the weather in a city.", "Get the current weather.", "The weather of a place.", "Weather"))
    has_unit = rng.random() < 0.25
    parameters = {_place_name(rng): "string"} | ({"unit": "celsius|fahrenheit"} if has_unit else {})

    def use(rng: Random) -> Use:
        city, unit, condition = _city(rng), rng.choice(("celsius", "fahrenheit")), rng.choice(t.CONDITIONS)
        degrees = rng.randint(0, 39)
        asked = rng.choice(
            (
                f"What is the weather in {city}",
                f"What is the weather in {city}",
                f"What's the weather like in {city}",
                f"What is the weather like in {city}",
                f"How is the weather in {city}",
                f"Is it {rng.choice(t.CONDITIONS)} in {city}",
            )
        )
        asked += rng.choice(("", "", "", " today", " now")) + (f" in {unit}?" if has_unit else "?")
        heat = rng.choice(("temperature", "temperature", "degrees", "temp"))
        result = {heat: degrees, rng.choice(("condition", "condition", "sky", "weather")): condition}
        if rng.random() < 0.3:
            result = {"city": city, **result}
        return Use(asked, [city, unit][: 1 + has_unit], result, f"It is {condition} in {city}, {degrees} degrees.")

    return ToolOffer(name, told, parameters, use)


def _time(rng: Random) -> ToolOffer:
    name = _function_name("time", rng)
    told = rng.choice(("Get the time in a city.", "The current time in a place.", "Time"))

    def use(rng: Random) -> Use:
        city, clock = _city(rng), f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        asked = rng.choice(
            (f"What time is it in {city}?", f"What is the time in {city}?", f"Tell me the time in {city}.")
        )
        return Use(asked, [city], {"time": clock}, f"It is {clock} in {city}.")

    return ToolOffer(name, told, {_place_name(rng): "string"}, use)


def _sum(rng: Random) -> ToolOffer:
    name = rng.choice(
        ("add", "add", "add_numbers", "sum", "plus", _function_name("sum", rng), _function_name("add", rng))
    )
    told = rng.choice(("Add two numbers.", "Add a and b.", "The sum of two numbers.", "Sum"))
    one, two = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    kind = rng.choice(("number", "integer"))

    def use(rng: Random) -> Use:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        asked = rng.choice((f"What is {a}+{b}?", f"What is {a} + {b}?", f"Add {a} and {b}.", f"What is {a} plus {b}?"))
        return Use(asked, [a, b], {rng.choice(("result", "sum")): a + b}, f"The result of {a}+{b} is {a + b}.")

    return ToolOffer(name, told, {one: kind, two: kind}, use)


def _capital(rng: Random) -> ToolOffer:
    name = _function_name("capital", rng)
    told = rng.choice(("Get the capital of a country.", "The capital city of a country.", "Capital"))

    def use(rng: Random) -> Use:
        place = country(rng)
        city = t.CAPITALS[place]
        asked = rng.choice(
            (f"What is the capital of {place}?", f"What's the capital of {place}?", f"Tell me the capital of {place}.")
        )
        return Use(asked, [place], {"capital": city}, f"The capital of {place} is {city}.")

    return ToolOffer(name, told, {_parameter_name(("country", "country", "nation", "land"), rng): "string"}, use)


def _message(rng: Random) -> ToolOffer:
    name = rng.choice(("send_message", "send_message", "send_email", _function_name("message", rng)))
    told = rng.choice(("Send a message to a person.", "Send a text to somebody.", "Send a message."))
    to, text = rng.choice((("to", "text"), ("to", "text"), ("person", "message"), ("name", "body")))

    def use(rng: Random) -> Use:
        person = person_name(rng)
        words = rng.choice((*t.GREETINGS, "See you soon", "Thank you", "Good night", echo(rng, 2)))
        asked = rng.choice((f"Send {person} the message {words}.", f"Send a message to {person}: {words}."))
        return Use(asked, [person, words], {"status": "sent"}, f"I have sent the message to {person}.")

    return ToolOffer(name, told, {to: "string", text: "string"}, use)


def _search(rng: Random) -> ToolOffer:
    name = rng.choice(("search", "search", "search_web", "web_search", _function_name("pages", rng)))
    told = rng.choice(("Search the web.", "Find pages about a topic.", "Search"))

    def use(rng: Random) -> Use:
        topic, found = rng.choice(t.UNKNOWN_TOPICS), rng.choice(list(t.FACTS.values()))
        asked = rng.choice((f"Search for {topic}.", f"Search the web for {topic}.", f"Find something about {topic}."))
        return Use(asked, [topic], {"found": found}, f"I have found this: {found}")

    return ToolOffer(name, told, {_parameter_name(("query", "query", "q", "topic"), rng): "string"}, use)


def _timer(rng: Random) -> ToolOffer:
    name = rng.choice(("set_timer", "set_timer", "start_timer", _function_name("timer", rng)))

    def use(rng: Random) -> Use:
        minutes = rng.randint(1, 60)
        asked = rng.choice((f"Set a timer for {minutes} minutes.", f"Start a timer of {minutes} minutes."))
        return Use(asked, [minutes], {"status": "started"}, f"The timer is set for {minutes} minutes.")

    return ToolOffer(
        name, rng.choice(("Set a timer.", "Start a timer.")), {_parameter_name(("minutes",), rng): "integer"}, use
    )


def _lookup(rng: Random) -> ToolOffer:
    """Any tool at all, of a property that no question of another kind has."""
    noun = rng.choice(t.PROPERTIES) if rng.random() < 0.7 else person_name(rng, 0.0).lower()
    name = _function_name(noun, rng)
    parameter = _parameter_name(("name", "person", "who", "key", "id"), rng)

    def use(rng: Random) -> Use:
        person = person_name(rng)
        value = rng.choice((rng.randint(1, 999), rng.choice(t.COLOURS), person_name(rng, 0.0)))
        asked = rng.choice((f"What is the {noun} of {person}?", f"Tell me the {noun} of {person}."))
        return Use(asked, [person], {noun: value}, f"The {noun} of {person} is {value}.")

    return ToolOffer(name, f"Get the {noun} of a person.", {parameter: "string"}, use)


_KINDS = (_weather, _time, _sum, _capital, _message, _search, _timer, _lookup)
_WEIGHTS = (4.0, 2.0, 2.0, 1.5, 1.5, 1.0, 1.0, 3.0)


def _call(offer: ToolOffer, arguments: list[Any], identity: str) -> Message:
    function = {"name": offer.name, "arguments": dict(zip(offer.parameters, arguments, strict=True))}
    return {"role": "assistant", "tool_calls": [{"id": identity, "type": "function", "function": function}]}


def _no_tool(rng: Random, offered: list[Callable[[Random], ToolOffer]]) -> Exchange:
    """A question that needs none of the tools: the model knows the answer, or a tool for it is missing."""
    if rng.random() < 0.25:
        missing = rng.choice([kind for kind in (_weather, _time, _lookup) if kind not in offered] or [_lookup])
        if missing not in offered:
            return missing(rng).use(rng).asked, t.UNKNOWN_ANSWER
    while True:
        asked, answer = simple_exchanges(rng, 1)[0]
        known = (_sum in offered and answer.startswith("The result")) or (_capital in offered and "capital" in answer)
        if not known and len(answer) < 120:
            return asked, answer


def _result(result: dict[str, Any], rng: Random) -> str:
    """What a tool answers: JSON, or only the value of it."""
    if len(result) == 1 and rng.random() < 0.35:
        return str(next(iter(result.values())))
    return json.dumps(result, ensure_ascii=False)


def tool_chat(rng: Random) -> tuple[list[Message], list[Tool]]:
    """(messages, tools) of a chat with one to three questions, of which some need a tool."""
    kinds: list[Callable[[Random], ToolOffer]] = []
    for kind in rng.choices(_KINDS, _WEIGHTS, k=rng.choice((1, 1, 2, 2, 3))):
        if kind not in kinds:
            kinds.append(kind)
    offers = [kind(rng) for kind in kinds]
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(t.SYSTEM_PROMPTS)})
    for number in range(rng.choice((1, 1, 2, 2, 3))):
        if rng.random() < 0.25:
            asked, answer = _no_tool(rng, kinds)
            messages += [{"role": "user", "content": casual(asked, rng)}, {"role": "assistant", "content": answer}]
            continue
        offer = rng.choice(offers)
        asked, arguments, result, answer = offer.use(rng)
        identity = f"call_{number}"
        messages += [
            {"role": "user", "content": casual(asked, rng)},
            _call(offer, arguments, identity),
            {"role": "tool", "tool_call_id": identity, "content": _result(result, rng)},
            {"role": "assistant", "content": answer},
        ]
    return messages, [offer.schema for offer in offers]
