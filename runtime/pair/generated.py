"""Generated question-and-answer material: chat, arithmetic, structured data and small programs.

Each generator draws a (prompt, answer) pair from a `random.Random`. The answers follow from the prompts:
names, numbers and lists are carried over, sums are right, and the words in between are drawn from many.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

Pair = tuple[str, str]
Generator = Callable[[Random], Pair]


def _words(text: str) -> list[str]:
    return text.split()


NAMES = _words(
    "Ada Amir Anna Bela Bruno Carla Chen Clara Daniel Dora Elena Emil Erik Farah Felix Greta Hana "
    "Hugo Ines Ivan Jonas Julia Karim Lara Leo Lin Luca Maja Marta Mila Nadia Nils Noor Olga Omar "
    "Otto Paula Petra Rafael Rosa Sami Sara Sofia Stefan Tara Theo Tomas Vera Viktor Yara Yuki Zoe"
)
CITIES = _words(
    "Aarhus Athens Basel Bergen Bern Bologna Bristol Cairo Cusco Dakar Dublin Essen Fez Galway Ghent "
    "Graz Hanoi Helsinki Izmir Kyoto Leeds Lima Lisbon Lyon Malaga Milan Nairobi Naples Oslo Porto "
    "Prague Quito Riga Rome Seoul Seville Tallinn Tunis Turin Utrecht Valencia Vienna Vilnius York "
    "Zagreb"
)
ITEMS = _words(
    "apples books bottles boxes brushes candles chairs cups eggs envelopes flowers jars keys lamps "
    "lemons loaves maps melons mugs notebooks onions oranges pears pencils plates pots ribbons ropes "
    "shirts shells spoons stamps stones tickets tiles towels toys trees"
)
INTERESTS = {
    "museums": ("the city museum", "the old gallery", "a small exhibition of prints"),
    "food": ("the covered market", "a bakery near the square", "a family restaurant by the river"),
    "music": ("a concert in the hall", "a jazz bar in the old town", "the music school's open stage"),
    "nature": ("the botanical garden", "a walk along the river", "the hill behind the station"),
    "history": ("the old fortress", "the cathedral", "a guided tour of the walls"),
    "sport": ("the climbing hall", "a bicycle ride around the lake", "the swimming pool"),
    "shopping": ("the shops on the main street", "the flea market", "a bookshop with a cafe"),
    "architecture": ("the town hall", "the modern library", "the houses along the canal"),
}
FOODS = _words(
    "beans beef butter cabbage carrots cheese chicken cream eggs garlic ginger leeks lentils "
    "mushrooms noodles olives onions peas peppers potatoes pumpkin rice salmon spinach tofu tomatoes "
    "zucchini"
)
DISHES = _words("soup stew salad curry pie gratin omelette casserole risotto stir-fry")
SUBJECTS = {
    "the budget": ("the costs for travel went up", "we need a new estimate"),
    "the schedule": ("two dates have moved", "the team needs a clear plan"),
    "the report": ("the last chapter is missing", "the figures must be checked"),
    "the meeting": ("the room is not free any more", "we should agree on a new time"),
    "the contract": ("one clause is still open", "both sides want to sign soon"),
    "the new website": ("the pages load slowly", "the pictures are too large"),
    "the workshop": ("more people signed up than expected", "we need a larger room"),
    "the delivery": ("the parcel has not arrived", "the customer is waiting"),
    "the garden project": ("the plants need water", "nobody is free at the weekend"),
    "the training course": ("the teacher is ill", "we need someone to step in"),
}
REQUESTS = (
    "send me the latest version",
    "tell me when you have time to talk",
    "confirm that the plan still works",
    "check the numbers once more",
    "share your ideas with the team",
    "call me back",
    "find a date that suits everyone",
    "let me know what you need",
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
PROBLEMS = {
    "sleep better": (
        "Go to bed at the same time every night",
        "Leave the phone in another room",
        "Drink no coffee after lunch",
        "Keep the bedroom cool and dark",
        "Read a few pages of a quiet book",
        "Take a short walk in the evening",
    ),
    "learn a language": (
        "Learn ten words a day and repeat them the next morning",
        "Listen to the radio while you cook",
        "Find a partner to talk to once a week",
        "Write three sentences about your day",
        "Read children's books aloud",
        "Label things in your home with their names",
    ),
    "save money": (
        "Write down what you spend for a month",
        "Cook at home and take lunch with you",
        "Cancel the subscriptions you do not use",
        "Put a fixed sum aside on the first of the month",
        "Wait a week before you buy anything large",
        "Compare prices before you renew a contract",
    ),
    "get fit": (
        "Start with twenty minutes of brisk walking",
        "Use the stairs instead of the lift",
        "Pick a sport that you enjoy",
        "Train with a friend so that you keep at it",
        "Rest for a day after a hard session",
        "Note your progress each week",
    ),
    "focus at work": (
        "Turn off notifications for an hour",
        "Do the hardest task first",
        "Clear your desk before you start",
        "Take a break every fifty minutes",
        "Write a list of three things for the day",
        "Answer mail at fixed times only",
    ),
    "grow vegetables": (
        "Choose a sunny spot with good soil",
        "Begin with lettuce, radishes and beans",
        "Water early in the morning",
        "Pull out the weeds while they are small",
        "Feed the soil with compost",
        "Plant again as soon as a bed is free",
    ),
    "prepare for an exam": (
        "Make a plan that ends two days before the exam",
        "Solve old papers against the clock",
        "Explain each topic to someone else",
        "Sleep well the night before",
        "Collect your mistakes in a notebook",
        "Start with the topics that you know least",
    ),
    "write more clearly": (
        "Put the main point in the first sentence",
        "Use short words and active verbs",
        "Cut every word that does no work",
        "Read the text aloud",
        "Ask a friend where they got lost",
        "Leave a day between writing and editing",
    ),
}
TRAITS = {
    "a bicycle": ("cheap to run", "quick in town", "tiring in the rain"),
    "a car": ("warm and dry", "good for heavy loads", "expensive to park"),
    "a train": ("restful on long trips", "safe in winter", "bound to a timetable"),
    "a laptop": ("easy to carry", "quiet", "hard to repair"),
    "a desktop computer": ("powerful for its price", "simple to upgrade", "fixed to one place"),
    "a tablet": ("light", "good for reading", "slow for long texts"),
    "a paper notebook": ("free of distractions", "always ready", "impossible to search"),
    "a flat in the city": ("close to work", "near shops and friends", "noisy at night"),
    "a house in the country": ("quiet", "surrounded by green", "far from the station"),
    "a gas stove": ("fast", "easy to control", "a risk without fresh air"),
    "an electric stove": ("clean", "simple to wipe", "slow to cool down"),
    "a cat": ("independent", "calm", "hard to train"),
    "a dog": ("loyal", "good company on walks", "in need of much time"),
}
PLACES = _words("forest harbour library lighthouse market mill mountain orchard station tower valley village")
THINGS = _words("bell clock coin compass key lamp letter map mirror ring violin watch")
MOODS = _words("brave careful cheerful clever curious gentle honest patient quiet stubborn")


def _listed(words: list[str] | tuple[str, ...]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def _trip(rng: Random) -> Pair:
    city, days = rng.choice(CITIES), rng.randint(2, 4)
    chosen = rng.sample(list(INTERESTS), rng.randint(2, 3))
    ask = rng.choice(
        (
            "Plan {days} days in {city}. I like {likes}.",
            "We are going to {city} for {days} days and love {likes}. What should we do?",
            "Can you suggest a {days}-day trip to {city} for someone who enjoys {likes}?",
        )
    )
    lines = [f"Here is a plan for {days} days in {city} with {_listed(chosen)}."]
    for day in range(1, days + 1):
        first, second = rng.choice(chosen), rng.choice(list(INTERESTS))
        morning, evening = rng.choice(INTERESTS[first]), rng.choice(INTERESTS[second])
        opening = rng.choice(("Start at", "Begin with", "In the morning, see", "After breakfast, visit"))
        closing = rng.choice(("In the evening, try", "Later, go to", "End the day at", "After dinner, enjoy"))
        lines.append(f"Day {day}: {opening} {morning}. {closing} {evening}.")
    lines.append(rng.choice((f"Enjoy {city}!", "Have a good trip!", f"I hope you like {city}.")))
    return ask.format(days=days, city=city, likes=_listed(chosen)), "\n".join(lines)


def _recipe(rng: Random) -> Pair:
    foods, dish = rng.sample(FOODS, rng.randint(3, 5)), rng.choice(DISHES)
    ask = rng.choice(
        (
            "I have {foods}. How do I make a {dish}?",
            "Give me a recipe for a {dish} with {foods}.",
            "What {dish} can I cook from {foods}?",
        )
    )
    steps = [
        f"Wash the {foods[0]} and cut the {foods[1]} into small pieces.",
        f"Heat some oil and add the {foods[1]}. Stir for {rng.randint(2, 9)} minutes.",
        f"Add the {foods[0]} and the {foods[2]}.",
        *(f"Then mix in the {food}." for food in foods[3:]),
        f"Let it cook for {rng.choice((10, 15, 20, 25, 30, 40))} minutes over low heat.",
        rng.choice(
            ("Season with salt and pepper.", "Add herbs and a little lemon juice.", "Taste and add salt.")
        ),
        f"Serve the {dish} {rng.choice(('hot', 'warm with bread', 'with a green salad', 'at once'))}.",
    ]
    numbered = [f"{index}. {step}" for index, step in enumerate(steps, 1)]
    title = f"{foods[0].capitalize()} and {foods[1]} {dish} for {rng.randint(2, 6)} people:"
    return ask.format(foods=_listed(foods), dish=dish), "\n".join([title, *numbered])


def _mail(rng: Random) -> Pair:
    name, sender = rng.sample(NAMES, 2)
    subject, request, day = rng.choice(list(SUBJECTS)), rng.choice(REQUESTS), rng.choice(DAYS)
    ask = rng.choice(
        (
            "Write a short mail from {sender} to {name} about {subject}: {request} by {day}.",
            "Help {sender} write to {name}. It is about {subject}, and {name} should {request} before {day}.",
            "Draft a friendly message to {name} on {subject} ({request}, {day}). Sign it {sender}.",
        )
    )
    opening = rng.choice(
        ("I hope you are well.", "Thank you for your last message.", "I hope your week went well.")
    )
    reasons = SUBJECTS[subject]
    body = rng.choice(
        (
            f"I am writing about {subject}. As you may know, {reasons[0]}, and {reasons[1]}.",
            f"A quick word on {subject}: {reasons[0]}. That means {reasons[1]}.",
            f"This is about {subject}. At the moment {reasons[0]}, so {reasons[1]}.",
        )
    )
    close = rng.choice(("Best wishes", "Kind regards", "Many thanks", "See you soon"))
    answer = f"Dear {name},\n\n{opening} {body} Could you {request} by {day}?\n\n{close},\n{sender}"
    return ask.format(name=name, sender=sender, subject=subject, request=request, day=day), answer


def _advice(rng: Random) -> Pair:
    goal, name, count = rng.choice(list(PROBLEMS)), rng.choice(NAMES), rng.randint(3, 5)
    ask = rng.choice(
        (
            "How can I {goal}? Give me {count} tips.",
            "My friend {name} wants to {goal}. What are {count} things to try?",
            "I would like to {goal}. Please list {count} ideas.",
        )
    )
    reasons = (
        "it costs nothing",
        "small steps add up",
        "it soon becomes a habit",
        "most people see a change within a week",
        "it saves time later",
        "you will notice the difference",
    )
    pairs = zip(rng.sample(PROBLEMS[goal], count), rng.sample(reasons, count), strict=True)
    lines = [f"{index}. {tip}: {why}." for index, (tip, why) in enumerate(pairs, 1)]
    who = name if "{name}" in ask else "you"
    ending = rng.choice((f"Which of these suits {who} best?", "Start with the first one.", "Good luck!"))
    head = f"Here are {count} ways to {goal}:"
    return ask.format(goal=goal, name=name, count=count), "\n".join([head, *lines, ending])


def _compare(rng: Random) -> Pair:
    first, second = rng.sample(list(TRAITS), 2)
    ask = rng.choice(
        (
            "Should I get {a} or {b}?",
            "What are the pros and cons of {a} compared with {b}?",
            "Compare {a} and {b} for me.",
        )
    )
    good, bad = TRAITS[first], TRAITS[second]
    a, b = (text.split(" ", 1)[1] for text in (first, second))
    answer = (
        f"Both have their merits. {first.capitalize()} is {good[0]} and {good[1]}, but {good[2]}. "
        f"{second.capitalize()} is {bad[0]} and {bad[1]}, but {bad[2]}. "
        f"If you want something {rng.choice(good[:2])}, take the {a}; "
        f"if it should be {rng.choice(bad[:2])}, the {b} is the better choice."
    )
    return ask.format(a=first, b=second), answer


def _story(rng: Random) -> Pair:
    hero, friend = rng.sample(NAMES, 2)
    place, goal = rng.sample(PLACES, 2)
    thing, mood = rng.choice(THINGS), rng.choice(MOODS)
    ask = rng.choice(
        (
            "Tell me a story about {hero}, a {thing} and a {place}.",
            "Write a short story: {hero} finds a {thing} in the {place}.",
            "Make up a tale in which {mood} {hero} carries a {thing} to the {place}.",
        )
    )
    sentences = [
        rng.choice(
            (f"Once there lived a {mood} child named {hero}", f"{hero} was known to be {mood} and lived")
        )
        + f" near the {place}.",
        rng.choice(
            (
                f"One morning {hero} found an old {thing} under a stone.",
                f"On a cold evening a stranger gave {hero} a {thing}.",
                f"In the attic there was a {thing} that nobody had touched for years.",
            )
        ),
        rng.choice(
            (
                f'"Take it to the {goal}," said {friend}, "before the sun goes down."',
                f"{friend} had seen such a {thing} before and knew that it came from the {goal}.",
                f"A note beside it asked the finder to bring it to the {goal}.",
            )
        ),
        rng.choice(
            (
                f"So {hero} and {friend} set out together, past the {place} and over the bridge.",
                f"The way was long, but {hero} did not turn back.",
                f"It rained all day, and {friend} wanted to rest, yet they walked on.",
            )
        ),
        rng.choice(
            (
                f"At the {goal} an old woman thanked them and gave them bread and honey.",
                f"When they reached the {goal}, the {thing} began to shine.",
                f"The keeper of the {goal} had waited for the {thing} for twenty years.",
            )
        ),
        rng.choice(
            (
                f"From that day on {hero} and {friend} were never apart.",
                f"And {hero} learned that being {mood} is sometimes enough.",
                "They came home late, tired and happy.",
            )
        ),
    ]
    return ask.format(hero=hero, thing=thing, place=place, mood=mood), " ".join(sentences)


def _schedule(rng: Random) -> Pair:
    tasks = rng.sample(
        (
            "answer mail",
            "write the report",
            "call the bank",
            "clean the kitchen",
            "practise the piano",
            "go for a run",
            "read the contract",
            "fix the bicycle",
            "plan the week",
            "buy food",
            "study for the exam",
            "water the plants",
        ),
        rng.randint(3, 4),
    )
    spans = [rng.choice((1, 1, 2, 3)) for _ in tasks]
    start = rng.randint(7, 10)
    wanted = _listed([f"{task} ({span} h)" for task, span in zip(tasks, spans, strict=True)])
    ask = rng.choice(
        (
            "I start at {start}:00 and have to {wanted}. Make a schedule.",
            "Please plan my day from {start}:00: {wanted}.",
        )
    )
    lines, hour = ["Here is your day:"], start
    for task, span in zip(tasks, spans, strict=True):
        lines.append(f"- {hour}:00 to {hour + span}:00: {task}")
        hour += span
    lines.append(f"You will be done at {hour}:00, after {sum(spans)} hours.")
    return ask.format(start=start, wanted=wanted), "\n".join(lines)


def _digits(rng: Random, low: int = 2, high: int = 4) -> int:
    size = rng.randint(low, high)
    return rng.randint(10 ** (size - 1), 10**size - 1)


def _addition(rng: Random) -> Pair:
    a, b = _digits(rng), _digits(rng)
    ask = rng.choice(
        ("What is {a} + {b}? Show the steps.", "Add {a} and {b} digit by digit.", "{a} + {b} = ?")
    )
    lines, carry, rest = [], 0, max(len(str(a)), len(str(b)))
    names = ("ones", "tens", "hundreds", "thousands")
    for place in range(rest):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        plus = f" + {carry}" if carry else ""
        carry = total // 10
        note = f"write {total % 10}, carry 1" if carry else f"write {total}"
        lines.append(f"{names[place]}: {x} + {y}{plus} = {total}, {note}")
    return ask.format(a=a, b=b), "\n".join([*lines, f"So {a} + {b} = {a + b}."])


def _product(rng: Random) -> Pair:
    a, b = _digits(rng, 2, 3), rng.randint(3, 9)
    ask = rng.choice(("Work out {a} x {b}.", "What is {a} times {b}?", "Multiply {a} by {b} step by step."))
    parts = [int(digit) * 10**place for place, digit in enumerate(str(a)[::-1]) if digit != "0"][::-1]
    lines = [f"Split {a} into {_listed([str(part) for part in parts])}."]
    lines += [f"{part} x {b} = {part * b}" for part in parts]
    lines.append(f"{' + '.join(str(part * b) for part in parts)} = {a * b}")
    return ask.format(a=a, b=b), "\n".join([*lines, f"So {a} x {b} = {a * b}."])


def _shopping(rng: Random) -> Pair:
    name, shop = rng.choice(NAMES), rng.choice(("market", "shop", "fair", "store"))
    (first, second), (m, n) = rng.sample(ITEMS, 2), (rng.randint(2, 9), rng.randint(2, 9))
    p, q = rng.randint(2, 9), rng.randint(2, 9)
    total = m * p + n * q
    paid = (total // 10 + rng.randint(1, 3)) * 10
    ask = (
        f"{name} buys {m} {first} for {p} euros each and {n} {second} for {q} euros each at the {shop}. "
        f"{name} pays with {paid} euros. How much change is there?"
    )
    answer = (
        f"The {first} cost {m} x {p} = {m * p} euros.\nThe {second} cost {n} x {q} = {n * q} euros.\n"
        f"Together that is {m * p} + {n * q} = {total} euros.\n"
        f"The change is {paid} - {total} = {paid - total} euros.\n{name} gets {paid - total} euros back."
    )
    return ask, answer


def _equation(rng: Random) -> Pair:
    a, x, b = rng.randint(2, 9), rng.randint(2, 20), rng.randint(1, 30)
    letter, c = rng.choice("xyzn"), a * x + b
    ask = rng.choice(("Solve {a}{l} + {b} = {c}.", "Find {l} if {a}{l} + {b} = {c}."))
    answer = (
        f"Subtract {b} from both sides: {a}{letter} = {c} - {b} = {c - b}.\n"
        f"Divide both sides by {a}: {letter} = {c - b} / {a} = {x}.\n"
        f"Check: {a} x {x} + {b} = {a * x} + {b} = {c}.\nSo {letter} = {x}."
    )
    return ask.format(a=a, l=letter, b=b, c=c), answer


def _sequence(rng: Random) -> Pair:
    start, step, count = rng.randint(1, 40), rng.randint(2, 12), rng.randint(3, 5)
    shown = [start + step * index for index in range(4)]
    more = [start + step * index for index in range(4, 4 + count)]
    ask = f"Continue the sequence {', '.join(map(str, shown))} with {count} more terms."
    lines = [f"Each term is {step} more than the one before: {shown[1]} - {shown[0]} = {step}."]
    previous = shown[-1]
    for term in more:
        lines.append(f"{previous} + {step} = {term}")
        previous = term
    return ask, "\n".join([*lines, f"The next terms are {_listed([str(term) for term in more])}."])


def _mean(rng: Random) -> Pair:
    count = rng.choice((3, 4, 5))
    values = [rng.randint(2, 60) for _ in range(count - 1)]
    values.append(count * rng.randint(max(values), max(values) + 20) - sum(values))
    total, running, lines = sum(values), values[0], []
    for value in values[1:]:
        lines.append(f"{running} + {value} = {running + value}")
        running += value
    thing = rng.choice(ITEMS)
    ask = rng.choice(
        (
            f"What is the mean of {_listed([str(value) for value in values])}?",
            f"On {count} days {rng.choice(NAMES)} sold {_listed([str(value) for value in values])} {thing}. "
            "What is the average per day?",
        )
    )
    lines.append(f"There are {count} values: {total} / {count} = {total // count}.")
    return ask, "\n".join([*lines, f"The mean is {total // count}."])


def _rectangle(rng: Random) -> Pair:
    a, b, thing = (
        rng.randint(3, 30),
        rng.randint(3, 12),
        rng.choice(("garden", "room", "field", "wall", "carpet")),
    )
    ask = f"A {thing} is {a} m long and {b} m wide. Find its area and its perimeter."
    answer = (
        f"The area is length times width: {a} x {b} = {a * b} square metres.\n"
        f"The perimeter is twice the sum of both: {a} + {b} = {a + b}, "
        f"and 2 x {a + b} = {2 * (a + b)} metres.\n"
        f"The {thing} has an area of {a * b} square metres and a perimeter of {2 * (a + b)} metres."
    )
    return ask, answer


FIELDS: dict[str, Generator] = {
    "name": lambda rng: rng.choice(NAMES),
    "city": lambda rng: rng.choice(CITIES),
    "age": lambda rng: rng.randint(18, 80),
    "item": lambda rng: rng.choice(ITEMS),
    "count": lambda rng: rng.randint(1, 99),
    "price": lambda rng: rng.randint(100, 9999) / 100,
    "day": lambda rng: rng.choice(DAYS),
    "code": lambda rng: "".join(rng.choices("ABCDEFGHKLMNPRSTUVWXYZ23456789", k=5)),
}  # type: ignore[assignment]


def _records(rng: Random) -> tuple[list[str], list[dict[str, object]]]:
    keys = rng.sample(list(FIELDS), rng.randint(3, 4))
    return keys, [{key: FIELDS[key](rng) for key in keys} for _ in range(rng.randint(2, 4))]


def _csv(rng: Random) -> Pair:
    keys, rows = _records(rng)
    table = "\n".join([",".join(keys), *(",".join(str(value) for value in row.values()) for row in rows)])
    kind = rng.choice(("json", "markdown", "sentences", "sql", "yaml"))
    if kind == "json":
        ask, answer = (
            "Convert this CSV to JSON.",
            "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]",
        )
    elif kind == "markdown":
        lines = [keys, ["---"] * len(keys), *([str(value) for value in row.values()] for row in rows)]
        ask, answer = (
            "Turn this into a Markdown table.",
            "\n".join(f"| {' | '.join(line)} |" for line in lines),
        )
    elif kind == "sql":
        name = rng.choice(("orders", "people", "stock", "visits"))
        ask = f"Write SQL that inserts these rows into {name}."
        answer = "\n".join(
            f"INSERT INTO {name} ({', '.join(keys)}) VALUES ({', '.join(repr(v) for v in row.values())});"
            for row in rows
        )
    elif kind == "yaml":
        ask = "Write this as YAML."
        answer = "\n".join(
            "\n".join(
                f"{'-' if not index else ' '} {key}: {value}"
                for index, (key, value) in enumerate(row.items())
            )
            for row in rows
        )
    else:
        ask = "Describe each row in a sentence."
        ordinals = ("first", "second", "third", "fourth")
        answer = "\n".join(
            f"In the {ordinal} row, " + _listed([f"the {key} is {value}" for key, value in row.items()]) + "."
            for ordinal, row in zip(ordinals, rows, strict=False)
        )
    return f"{ask}\n\n{table}", answer


def _extract(rng: Random) -> Pair:
    name, city, day, item = (FIELDS[key](rng) for key in ("name", "city", "day", "item"))
    count, price = rng.randint(2, 60), rng.randint(100, 9999) / 100
    text = rng.choice(
        (
            f"On {day} {name} from {city} ordered {count} {item} for {price} euros.",
            f"{name} called from {city}: {count} {item}, {price} euros in all, to be sent on {day}.",
            f"Please deliver {count} {item} to {name} in {city} on {day}; the bill is {price} euros.",
        )
    )
    record = {"name": name, "city": city, "day": day, "item": item, "count": count, "price": price}
    keys = rng.sample(list(record), rng.randint(3, 6))
    ask = f"Extract {_listed(keys)} as JSON.\n\n{text}"
    return ask, json.dumps({key: record[key] for key in keys}, indent=2)


def _sorting(rng: Random) -> Pair:
    words = rng.sample(rng.choice((NAMES, CITIES, ITEMS)), rng.randint(4, 7))
    ask = rng.choice(("Sort these alphabetically: {w}.", "Put into alphabetical order: {w}"))
    lines = [f"{index}. {word}" for index, word in enumerate(sorted(words), 1)]
    return ask.format(w=", ".join(words)), "\n".join(lines)


def _copy(rng: Random) -> Pair:
    kinds = rng.sample(list(FIELDS), rng.randint(1, 3))
    words = [str(FIELDS[rng.choice(kinds)](rng)) for _ in range(rng.randint(4, 12))]
    ask, answer = rng.choice(
        (
            ("Repeat: {line}", " ".join(words)),
            ("Copy this line.\n\n{line}", " ".join(words)),
            ("Number these: {line}", "\n".join(f"{index}. {word}" for index, word in enumerate(words, 1))),
            ("Make a bullet list of {line}", "\n".join(f"- {word}" for word in words)),
            ("Write these with commas: {line}", ", ".join(words)),
        )
    )
    return ask.format(line=" ".join(words)), answer


CONDITIONS = {
    "even": ("{x} % 2 == 0", lambda value: value % 2 == 0),
    "odd": ("{x} % 2 == 1", lambda value: value % 2 == 1),
    "positive": ("{x} > 0", lambda value: value > 0),
    "negative": ("{x} < 0", lambda value: value < 0),
    "divisible by three": ("{x} % 3 == 0", lambda value: value % 3 == 0),
    "larger than ten": ("{x} > 10", lambda value: value > 10),
}
NOUNS = _words("number value item entry score price weight count amount element")


def _filtering(rng: Random) -> Pair:
    words, noun = rng.choice(list(CONDITIONS)), rng.choice(NOUNS)
    kind = rng.choice(("sum", "count", "list", "largest"))
    test, holds = CONDITIONS[words]
    plural, adjective = noun + "s", words.replace(" ", "_")
    name = rng.choice((f"{kind}_{adjective}", f"{adjective}_{kind}", f"{kind}_of_{adjective}"))
    values = [rng.randint(-20, 40) for _ in range(rng.randint(4, 6))]
    chosen = [value for value in values if holds(value)]
    wanted = {"sum": "the sum", "count": "the number", "list": "a list", "largest": "the largest"}[kind]
    head = f'def {name}({plural}):\n    """Return {wanted} of the {plural} that are {words}."""\n'
    test = test.format(x=noun)
    if kind == "largest":
        body = f"    best = None\n    for {noun} in {plural}:\n"
        body += f"        if {test} and (best is None or {noun} > best):\n"
        body += f"            best = {noun}\n    return best\n"
        result = max(chosen, default=None)
    else:
        start, change = {
            "sum": ("total = 0", f"total += {noun}"),
            "count": ("total = 0", "total += 1"),
            "list": ("result = []", f"result.append({noun})"),
        }[kind]
        body = f"    {start}\n    for {noun} in {plural}:\n        if {test}:\n            {change}\n"
        body += f"    return {start.split()[0]}\n"
        result = {"sum": sum(chosen), "count": len(chosen), "list": chosen}[kind]
    ask = rng.choice(
        (
            "Write a Python function {name} that returns {wanted} of the {plural} that are {words}.",
            "Implement {name}({plural}): {wanted} of the {plural} that are {words}.",
        )
    )
    example = f"\n\nprint({name}({values}))  # {result}"
    return ask.format(name=name, wanted=wanted, plural=plural, words=words), head + body + example


def _dataclass(rng: Random) -> Pair:
    types = {
        "name": "str",
        "city": "str",
        "age": "int",
        "price": "float",
        "count": "int",
        "day": "str",
        "code": "str",
    }
    title = rng.choice(("Person", "Order", "Parcel", "Visit", "Ticket", "Account", "Product", "Booking"))
    keys = rng.sample(list(types), rng.randint(2, 4))
    first, last = keys[0], keys[-1]
    ask = rng.choice(("Write a dataclass {t} with the fields {f}.", "Define a Python dataclass {t}: {f}."))
    lines = ["from dataclasses import dataclass", "", "", "@dataclass", f"class {title}:"]
    lines.append(
        f'    """{rng.choice(("One", "A single", "A"))} {title.lower()} with its {_listed(keys)}."""'
    )
    lines += ["", *(f"    {key}: {types[key]}" for key in keys), ""]
    lines.append(
        f'    def describe(self) -> str:\n        return f"{title} {{self.{first}}}: {{self.{last}}}"'
    )
    values = ", ".join(repr(FIELDS[key](rng)) for key in keys)
    lines += ["", "", f"{title.lower()} = {title}({values})", f"print({title.lower()}.describe())"]
    return ask.format(t=title, f=_listed(keys)), "\n".join(lines)


def _arguments(rng: Random) -> Pair:
    options = {
        "--input": "file to read",
        "--output": "file to write",
        "--limit": "largest number of rows",
        "--verbose": "print each step",
        "--seed": "seed of the random numbers",
        "--host": "address to listen on",
        "--port": "port to listen on",
        "--force": "overwrite existing files",
        "--timeout": "seconds to wait",
        "--format": "output format",
    }
    numbers, flags = {"--limit": 100, "--seed": 0, "--port": 8000, "--timeout": 30}, ("--verbose", "--force")
    chosen = rng.sample(list(options), rng.randint(2, 4))
    ask = rng.choice(("Write an argument parser with the options {o}.", "Use argparse for the options {o}."))
    lines = ["import argparse", "", "", "def parse_args():"]
    lines.append(
        f'    parser = argparse.ArgumentParser(description="{rng.choice(("Run", "Start", "Try"))} the tool.")'
    )
    for option in chosen:
        if option in flags:
            how = 'action="store_true"'
        elif option in numbers:
            how = f"type=int, default={numbers[option]}"
        else:
            how = "required=True" if rng.random() < 0.5 else "default=None"
        lines.append(f'    parser.add_argument("{option}", {how}, help="{options[option]}")')
    lines.append("    return parser.parse_args()")
    return ask.format(o=_listed(chosen)), "\n".join(lines)


def _tests(rng: Random) -> Pair:
    functions = {
        "add": lambda a, b: a + b,
        "subtract": lambda a, b: a - b,
        "multiply": lambda a, b: a * b,
        "larger": max,
        "smaller": min,
        "difference": lambda a, b: abs(a - b),
    }
    name, count = rng.choice(list(functions)), rng.randint(3, 5)
    ask = rng.choice(("Write {n} tests for the function {f}(a, b).", "Test {f}(a, b) with {n} assertions."))
    lines = [f"def test_{name}():"]
    for _ in range(count):
        a, b = rng.randint(-9, 30), rng.randint(0, 30)
        lines.append(f"    assert {name}({a}, {b}) == {functions[name](a, b)}")
    return ask.format(n=count, f=name), "\n".join(lines)


CHAT: tuple[Generator, ...] = (_trip, _recipe, _mail, _advice, _compare, _story, _schedule)
MATH: tuple[Generator, ...] = (_addition, _product, _shopping, _equation, _sequence, _mean, _rectangle)
DATA: tuple[Generator, ...] = (_csv, _csv, _extract, _sorting, _copy, _copy)
CODE: tuple[Generator, ...] = (_filtering, _filtering, _dataclass, _arguments, _tests)
