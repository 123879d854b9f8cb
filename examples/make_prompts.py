"""Write a Parquet file of 126 prompts in nine categories: `python examples/make_prompts.py prompts.parquet`.

Columns: id, category, prompt. Some answers repeat much of their prompt (rewriting, extraction, code), some nothing
(chat, math), so acceptance differs by category.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from passages import PASSAGES

CODE = (
    (
        "Rename the variable `x` to `price`",
        "def total(items):\n    s = 0\n    for x in items:\n        if x > 0:\n            s = s + x\n    return s",
    ),
    ("Add type annotations", "def repeat(text, times):\n    return ' '.join([text] * times)"),
    ("Add a docstring", "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"),
    (
        "Replace the loop by a list comprehension",
        "squares = []\nfor n in range(10):\n    if n % 2 == 0:\n        squares.append(n * n)\nprint(squares)",
    ),
    (
        "Find and repair the error",
        "def average(values):\n    total = 0\n    for v in values:\n        total = v\n    return total / len(values)",
    ),
    (
        "Add a check that raises ValueError when `n` is negative",
        "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "Rewrite it with an f-string",
        "def greet(name, city):\n    return 'Hello ' + name + ', welcome to ' + city + '!'",
    ),
    (
        "Make the method return the new balance",
        "class Account:\n    def __init__(self, balance=0):\n        self.balance = balance\n\n"
        "    def deposit(self, amount):\n        self.balance += amount",
    ),
    ("Write three unit tests for it", "def clamp(value, low, high):\n    return max(low, min(value, high))"),
    (
        "Explain line by line what it does",
        "words = open('notes.txt').read().split()\ncounts = {}\nfor w in words:\n    counts[w] = counts.get(w, 0) + 1",
    ),
    (
        "Sort by age, oldest first",
        "people = [('Ann', 41), ('Ben', 29), ('Cem', 35)]\nfor name, age in people:\n    print(name, age)",
    ),
    (
        "Translate it to JavaScript",
        "def fib(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    (
        "Change the query so that it returns the ten newest orders",
        "SELECT id, customer, total FROM orders WHERE total > 100 ORDER BY id;",
    ),
    (
        "Use `with` to close the file in every case",
        "f = open('data.csv')\nfor line in f:\n    fields = line.strip().split(',')\n"
        "    print(fields[0], fields[2])\nf.close()",
    ),
)

MATH = (
    "A shop sells pencils at 3 for 2 euros. How much do 18 pencils cost?",
    "A train travels 150 kilometres in 2 hours and then 90 kilometres in 1 hour. What is its average speed?",
    "Nora has 48 stickers. She gives a quarter of them to Ben and then 6 to Lea. How many are left?",
    "A rectangle is 12 cm long and 7 cm wide. What are its area and its perimeter?",
    "Solve for x: 5x - 8 = 2x + 13.",
    "A recipe for 4 people needs 300 g of flour. How much flour do 10 people need?",
    "The price of a coat fell from 80 euros to 60 euros. By how many percent did it fall?",
    "What is the sum of all whole numbers from 1 to 40?",
    "A tank holds 240 litres. One tap fills it in 8 hours, another in 12 hours. How long do both need together?",
    "Two dice are thrown. What is the probability that the sum is 7?",
    "A worker earns 14.50 euros an hour and works 37 hours a week. What does she earn in 4 weeks?",
    "Find the next three numbers of the sequence 2, 6, 12, 20, 30 and explain the rule.",
    "A father is three times as old as his son. In 12 years he will be twice as old. How old are they now?",
    "Convert 7/8 to a decimal number and to a percentage.",
)

TRANSLATION = (
    ("French", "The library is closed on Mondays, but you can return books at any time."),
    ("Spanish", "My sister works in a hospital and often comes home late at night."),
    ("German", "Please close the window before you leave the room."),
    ("Italian", "We would like to reserve a table for four people at eight o'clock."),
    ("French", "The children built a small house out of wood and stones."),
    ("Spanish", "It has not rained for three weeks, and the river is almost dry."),
    ("German", "The meeting was moved from Tuesday to Thursday because the train was late."),
    ("Portuguese", "The beach is a ten-minute walk from the old town."),
    ("French", "Could you tell me where I can buy a ticket for the museum?"),
    ("Spanish", "He has read the same book five times and still finds something new in it."),
    ("German", "I have lived in this city for ten years and know every street."),
    ("Italian", "The soup needs more salt, and the bread is still warm."),
    ("Dutch", "The bicycle is in the shed behind the house."),
    ("French", "If the weather is fine tomorrow, we will go to the mountains."),
)

KNOWLEDGE = (
    "What is the capital of Australia, and why was it chosen?",
    "Explain in simple words why leaves change their colour in autumn.",
    "What is the difference between a virus and a bacterium?",
    "List the planets of the solar system in order from the sun.",
    "Who wrote Don Quixote, and what is it about?",
    "How does a rainbow form?",
    "What causes the tides?",
    "What is inflation, and how does it affect savings?",
    "Name five inventions of the nineteenth century and say what each was for.",
    "What is photosynthesis?",
    "Why do we have leap years?",
    "What is the difference between weather and climate?",
    "How does a vaccine protect a person?",
    "What are the three states of matter? Give two examples of each.",
)

CHAT = (
    "I have two hours this evening and an empty fridge. What should I do?",
    "Write a short poem about a cat that is afraid of the dark.",
    "Give me five names for a small bakery by the sea, with one sentence about each.",
    "My friend is moving to another city. Help me write her a warm farewell note.",
    "I find it hard to get up in the morning. What can I try?",
    "Tell me a story in six sentences about a robot that learns to paint.",
    "What should I pack for a weekend in the mountains in October?",
    "Write an invitation to a birthday picnic in the park on Saturday at three.",
    "Pretend that you are a tour guide in ancient Rome and greet your group.",
    "How do I politely say no to a colleague who always asks me for help?",
    "Write a dialogue between a teacher and a student who forgot the homework.",
    "Suggest three easy hobbies for somebody who works at a computer all day.",
    "Write a product description for a wooden toy train.",
    "Explain to a ten-year-old what a computer program is.",
)


def prompts() -> list[tuple[str, str]]:
    """(category, prompt) of every row."""
    rows: list[tuple[str, str]] = []
    for passage in PASSAGES:
        old, new = passage.replace
        about = f"Title: {passage.title}\n\n{passage.text}"
        rows += [
            ("summarisation", f"Summarise the following text in two sentences.\n\n{about}"),
            (
                "rewriting",
                f'Replace the word "{old}" by "{new}" and return the whole text, otherwise unchanged.\n\n{about}',
            ),
            ("extraction", f"From the following text, extract {passage.extract}.\n\n{about}"),
            ("reading", f"{about}\n\nQuestion: {passage.question} Answer with words from the text."),
        ]
    rows += [
        ("code", f"{task} in the following code and show the whole result.\n\n```\n{code}\n```") for task, code in CODE
    ]
    rows += [("math", f"{problem} Show your steps.") for problem in MATH]
    rows += [("translation", f"Translate into {language}: {sentence}") for language, sentence in TRANSLATION]
    rows += [("knowledge", question) for question in KNOWLEDGE]
    rows += [("chat", message) for message in CHAT]
    return rows


def write(path: Path) -> int:
    """Write the file; returns the number of prompts."""
    rows = prompts()
    table = pa.table(
        {
            "id": [f"{category}-{index:03}" for index, (category, _) in enumerate(rows)],
            "category": [category for category, _ in rows],
            "prompt": [prompt for _, prompt in rows],
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return len(rows)


if __name__ == "__main__":
    destination = Path(sys.argv[1] if len(sys.argv) > 1 else "prompts.parquet")
    print(f"{write(destination)} prompts written to {destination}")
