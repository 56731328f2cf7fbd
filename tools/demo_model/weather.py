"""Chats that call a weather tool in the Hermes form, and answer from what the tool returns.

The tool's name, its parameter and the shape of its result vary, so that the model reads them from the chat
instead of knowing one by heart; cities are often invented, so that copying is the only way to be right.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tools.demo_model import chats, phrases
from tools.demo_model.phrases import expand, words

CONDITIONS = "sunny cloudy rainy windy snowy foggy stormy clear overcast dry".split()
ASK = (
    "{what's the weather in [c]|what is the weather in [c]|what's the weather like in [c]|"
    "how is the weather in [c]|"
    "what is the weather like in [c] today|how's the weather in [c]|weather in [c]|"
    "tell me the weather in [c]|"
    "what is the temperature in [c]|how warm is it in [c]|how cold is it in [c]|"
    "what's the temperature in [c]|"
    "is it raining in [c]|is it cold in [c]|is it warm in [c]|weather [c]|do I need a coat in [c]|"
    "please check the weather in [c]|can you tell me the weather in [c]|"
    "I am going to [c]. What is the weather there|"
    "what will the weather be in [c]|I want to know the weather in [c]|get the weather for [c]|"
    "is it sunny in [c]}"
)


def weather_tool(rng: random.Random) -> tuple[dict[str, Any], str]:
    """Return (tool definition in OpenAI's form, name of its place parameter)."""
    usual = rng.random() < 0.5
    name = (
        "get_weather"
        if usual
        else rng.choice(("get_weather", "get_current_weather", "weather", "weather_now"))
    )
    place = "city" if usual or rng.random() < 0.5 else rng.choice(("location", "place", "city_name"))
    about = "Get the weather in a city." if usual else expand(
        rng,
        "{Get|Look up|Returns} the {current |}{weather|temperature} "
        "{in|for|of} a {city|given city|place}{.|}"
    )  # fmt: skip
    field: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        field["description"] = expand(
            rng, "{The name of the city|The city|City name|The place, for example Paris}{.|}"
        )
    properties: dict[str, Any] = {place: field}
    if rng.random() < 0.1:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = [place]
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }, place


def other_tool(rng: random.Random) -> dict[str, Any]:
    """Make a second tool that must not be called, so that the model learns to pick the right one."""
    name, about, field = rng.choice(
        (("get_time", "Get the time in a city.", "city"), ("send_mail", "Send a mail.", "to"),
         ("search", "Search the web.", "query"), ("add", "Add two numbers.", "numbers"))
    )  # fmt: skip
    parameters = {"type": "object", "properties": {field: {"type": "string"}}, "required": [field]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


def _call(name: str, place: str, city: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": {place: city}}}


def _report(rng: random.Random, shape: int, city: str) -> tuple[str, str]:
    """Write what the tool returns, and what the assistant says about it."""
    condition = rng.choice(words("conditions"))
    degrees = rng.randint(-15, 42) if rng.random() < 0.8 else rng.randint(43, 105)
    unit = rng.choice(("celsius", "celsius", "fahrenheit"))
    results: list[tuple[Any, str]] = [
        ({"temperature": degrees, "condition": condition}, ""),
        ({"city": city, "temperature": degrees, "condition": condition}, ""),
        ({"temperature": degrees, "unit": unit, "condition": condition}, f" {unit.capitalize()}"),
        ({"temp_c": degrees, "condition": condition}, " Celsius"),
        ({"condition": condition, "temperature": degrees}, ""),
        (f"{degrees} degrees, {condition}", ""),
        (f"{condition}, {degrees}°C", " Celsius"),
        ({"temperature": degrees}, ""),
        ({"location": city, "temperature_celsius": degrees, "conditions": condition}, " Celsius"),
    ]
    result, suffix = results[shape % len(results)]
    text = result if isinstance(result, str) else json.dumps(result)
    if condition in text:
        return text, f"It is {degrees} degrees{suffix} and {condition} in {city}."
    return text, f"It is {degrees} degrees{suffix} in {city}."


def weather_chat(rng: random.Random) -> dict[str, Any]:
    """Make a chat with tools: mostly a call and its answer, sometimes for two cities, or without a call."""
    tool, place = weather_tool(rng)
    name = tool["function"]["name"]
    tools = [tool]
    if rng.random() < 0.2:
        tools.insert(rng.randint(0, 1), other_tool(rng))
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice(chats.SYSTEMS)})
    for _ in range(rng.choices((1, 2), (0.75, 0.25))[0]):
        if rng.random() < 0.15:
            turn = rng.choice((chats.greeting, chats.count, chats.addition, chats.opposite))(rng)
            messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
            continue
        cities = [phrases.city(rng)]
        asked = cities[0]
        if rng.random() < 0.12:
            cities.append(phrases.city(rng))
            asked = " and ".join(cities)
        elif rng.random() < 0.08 and " " not in asked:
            # people type "paris"; only for listed cities, whose capital letter is known
            asked = asked.lower()
            if cities[0] not in words("cities"):
                cities = [rng.choice(words("cities"))]
                asked = cities[0].lower()
        question = expand(rng, ASK, {"c": asked})
        question = question[0].upper() + question[1:] if rng.random() < 0.6 else question
        messages.append({"role": "user", "content": question + rng.choice(("?", "?", "?", "", "."))})
        calls = [_call(name, place, city) for city in cities]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        shape, answers = rng.randrange(9), []
        for city in cities:
            text, answer = _report(rng, shape, city)
            messages.append({"role": "tool", "name": name, "content": text})
            answers.append(answer)
        messages.append({"role": "assistant", "content": " ".join(answers)})
    return {"messages": messages, "tools": tools}


def no_tool_chat(rng: random.Random) -> dict[str, Any]:
    """Make a question about the weather although no tool is offered, with the honest answer."""
    question = expand(rng, ASK, {"c": phrases.city(rng)})
    answer = "I cannot see the weather. Give me a weather tool and I will call it."
    turns = [{"role": "user", "content": question + rng.choice(("?", "?", ""))}]
    return {"messages": [*turns, {"role": "assistant", "content": answer}], "tools": None}
