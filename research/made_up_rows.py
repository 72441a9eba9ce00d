"""Rows of made-up applications, to try tuning without a data set: prompt and completion, one JSON object a line.

    python research/made_up_rows.py ticket > ticket.jsonl

api      a command for a device in a house -> the call of a function
recipe   a line of a list of ingredients -> JSON
ticket   a customer's complaint -> a form of seven lines, the last of which depends on the age of the product
booking  a request for a room -> an XML element, which has the number of nights and a discount that depends on it
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable

ROWS = 250
ROOMS = ("kitchen", "bedroom", "garage", "hall", "office", "attic", "nursery", "porch")
DEVICES = ("lamp", "heater", "fan", "blind", "speaker", "lock")
UNITS = {"cup": "cup", "cups": "cup", "tsp": "teaspoon", "tbsp": "tablespoon", "g": "gram", "ml": "millilitre"}
FOOD = ("flour", "brown sugar", "butter", "olive oil", "rice vinegar", "oat milk", "chickpeas", "ground cumin", "basil")
STATES = ("chopped", "melted", "sifted", "chilled", "toasted", "diced", None)
NAMES = ("Ada Byrne", "Omar Nasser", "Lin Wei", "Eva Roth", "Jon Vale", "Mia Kovac", "Raj Patel", "Zoe Stone")
PRODUCTS = ("router", "monitor", "keyboard", "printer", "webcam", "dock")
MONTHS = ("January", "March", "April", "June", "August", "October", "November")
FAULTS = ("does not power on", "overheats", "makes a loud noise", "loses its connection", "shows a blank screen")

Row = tuple[str, str]


def api(chance: random.Random) -> Row:
    """A command and its call."""
    room, device, level = chance.choice(ROOMS), chance.choice(DEVICES), chance.randrange(5, 100, 5)
    time = f"{chance.randrange(5, 23)}:{chance.choice(('00', '15', '30', '45'))}"
    which = f'room="{room}", kind="{device}"'
    return chance.choice(
        (
            (f"Set the {device} in the {room} to {level} percent.", f"device.set({which}, level={level})"),
            (f"Turn off the {room} {device} at {time}.", f'device.schedule({which}, action="off", at="{time}")'),
            (
                f"At {time}, switch on the {device} in the {room}.",
                f'device.schedule({which}, action="on", at="{time}")',
            ),
            (f"What is the {device} in the {room} doing?", f"device.query({which})"),
        )
    )


def recipe(chance: random.Random) -> Row:
    """An ingredient and its JSON."""
    amount, unit = chance.choice((1, 2, 3, 50, 100, 150, 200, 250)), chance.choice(tuple(UNITS))
    food, state = chance.choice(FOOD), chance.choice(STATES)
    found = {"amount": amount, "unit": UNITS[unit], "ingredient": food, "preparation": state}
    return f"{amount} {unit} {food}" + (f", {state}" if state else ""), json.dumps(found)


def ticket(chance: random.Random) -> Row:
    """A complaint and its form."""
    name, product, fault = (chance.choice(words) for words in (NAMES, PRODUCTS, FAULTS))
    days, urgency = chance.randrange(2, 40), chance.choice(("low", "medium", "high"))
    lines = ("TICKET", f"customer: {name}", f"product: {product}", f"fault: {fault}", f"age: {days} days")
    action = f"priority: {urgency.upper()}\naction: {'replace' if days <= 14 else 'repair'}"
    return f"{name} bought a {product} {days} days ago. It {fault}. Urgency is {urgency}.", "\n".join((*lines, action))


def booking(chance: random.Random) -> Row:
    """A request and its element."""
    name, month, room = chance.choice(NAMES), chance.choice(MONTHS), chance.choice(("single", "double", "family"))
    day, nights, meals = chance.randrange(1, 22), chance.randrange(1, 8), chance.choice(("breakfast", "half board"))
    rate = "weekly" if nights >= 5 else "standard"
    made = f'<booking guest="{name}" room="{room}">\n  <stay month="{month}" from="{day}" nights="{nights}" />\n'
    made += f'  <meals plan="{meals}" />\n  <rate plan="{rate}" />\n</booking>'
    return f"{name} would like a {room} room from {month} {day} to {month} {day + nights} with {meals}.", made


TASKS: dict[str, Callable[[random.Random], Row]] = {"api": api, "recipe": recipe, "ticket": ticket, "booking": booking}


def rows(task: str, count: int, seed: int) -> list[dict[str, str]]:
    """``count`` different rows of a task."""
    chance, found = random.Random(f"{task} {seed}"), dict[str, str]()
    while len(found) < count:
        found.update([TASKS[task](chance)])
    return [{"prompt": prompt, "completion": completion} for prompt, completion in found.items()]


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--count", type=int, default=ROWS, help="rows (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for row in rows(args.task, args.count, args.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
