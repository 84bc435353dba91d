"""Prompt templates: how the user's turn begins when a model writes prompts for several kinds of
tasks.

Without templates, a model writes only its favourite prompts. A template sets the task and the model
writes the rest: `{line}` up to the end of a line, `{rest}` up to where it closes the turn, and
`{passage}` a few whole sentences, for which it is asked as an assistant. `{name}`, `{number}`,
`{topic}`, `{thing}`, `{place}` and `{language}` are chosen at random from lists, so that a template
does not give the same prompt again and again.
"""

from __future__ import annotations

import re
from random import Random

GENERATED_FIELDS = ("line", "passage", "rest")
"""Fields that the model writes."""

TEMPLATES: dict[str, tuple[str, ...]] = {
    "maths": (
        "{name} has {number} {thing}.{rest}",
        "{name} buys {number} {thing} for ${number} each.{rest}",
        "{name} and {name} share {number} {thing}.{rest}",
        "A shop sells {thing} at ${number} a piece.{rest}",
        "Every day {name} spends {number} minutes{rest}",
        "There are {number} {thing} in a box and{rest}",
        "{name} earns ${number} an hour and works{rest}",
        "In a school of {number} pupils,{rest}",
        "A train travels {number} miles{rest}",
        "{name} is {number} years old.{rest}",
        "If {name} reads {number} pages a day, how{rest}",
        "A farmer in {place} has {number} animals:{rest}",
        "A recipe needs {number} cups of{rest}",
        "Solve step by step:{rest}",
    ),
    "translation": (
        "Translate German to English: Der{rest}",
        "Translate German to English: Die{rest}",
        "Translate German to English: Es ist{rest}",
        "Translate from German to English: Wir{rest}",
        "Translate the following sentence from German into English.\n\nIm{rest}",
        "Translate from French to English: Le{rest}",
        "Translate from French to English: Nous{rest}",
        "What does this Spanish sentence mean in English?\n\nEl{rest}",
        "Translate this sentence into {language}:{rest}",
        "How do you say in {language}:{rest}",
        "Translate English to French:{rest}",
    ),
    "summary": (
        "Summarize the following text in two sentences.\n\n{passage}",
        "Summarize: {passage}",
        "Write a short summary of this article about {topic}:\n\n{passage}",
        "What are the main points of the text below?\n\n{passage}",
        "{passage}\n\nSummarize the text above.",
        "Give a one-paragraph summary of this news report.\n\n({place}) {passage}",
        "Please shorten this to a few key points:\n\n{passage}",
    ),
    "question": (
        "who{rest}",
        "what is the{rest}",
        "when did{rest}",
        "where is{rest}",
        "how many{rest}",
        "which{rest}",
        "who was the first{rest}",
        "who wrote{rest}",
        "when was the{rest}",
        "what does{rest}",
        "where did the{rest}",
        "In which year{rest}",
        "What is the capital{rest}",
        "Who invented{rest}",
        "Why{rest}",
        "What is the difference between {topic} and{rest}",
        "Name the{rest}",
    ),
    "retrieval": (
        "Read the text and answer the question.\n\nText: {passage}\n\nQuestion:{line}",
        "{passage}\n\nUsing only the passage above, answer this question:{line}",
        "Context: {topic}. {passage}\n\nQuestion:{line}\nAnswer:",
        "Here are two passages.\n\n[1] {passage}\n\n[2] {passage}\n\nQuestion:{line}",
        "Answer the question from the documents below.\n\nDocument 1: {passage}\n\n"
        "Document 2: {passage}\n\n{line}",
        "Based on the following information about {topic},{line}\n\n{passage}",
        "List all names, places and dates in this text:\n\n{passage}",
    ),
    "writing": (
        "Write a short story about {topic}{rest}",
        "Write an email to {name}{rest}",
        "Compose a poem about {topic}{rest}",
        "Write a blog post about {topic}{rest}",
        "Describe {place}{rest}",
        "Write a persuasive{rest}",
        "Draft a letter{rest}",
        "Rewrite this in a more formal tone:{rest}",
        "Correct the grammar of this text:{rest}",
        "Edit the following paragraph so that it is clearer.\n\n{passage}",
    ),
    "roleplay": (
        "Pretend you are{rest}",
        "Imagine that you are {name}, a{rest}",
        "Act as a{rest}",
        "You are a doctor{rest}",
        "Explain {topic} as if you were{rest}",
    ),
    "reasoning": (
        "{name} is taller than {name},{rest}",
        "Which word does not belong with the others?{rest}",
        "Think step by step.{rest}",
        "Is it true that{rest}",
        "What would happen if{rest}",
        "Suppose that{rest}",
        "There are {number} people in a room.{rest}",
    ),
    "code": (
        "Write a Python function{rest}",
        "Write a function that{rest}",
        "Implement{rest}",
        "Complete this Python function.\n\ndef{rest}",
        "Explain what this code does:\n\n{rest}",
        "Write a program in C++ that{rest}",
        "Write an SQL query{rest}",
        "Write a regular expression{rest}",
    ),
    "knowledge": (
        "Explain {topic} in simple words.{rest}",
        "Explain how{rest}",
        "What are the causes of{rest}",
        "Describe the history of {topic}{rest}",
        "Compare {topic} with{rest}",
        "What is {topic}{rest}",
        "Give me {number} facts about{rest}",
        "What are some tips for{rest}",
        "How does {topic} affect{rest}",
        "List the{rest}",
    ),
    "extraction": (
        "Extract the names of all people from this text, as a list.\n\n{passage}",
        "Turn the following text into a table.\n\n{passage}",
        "Return the following facts as JSON.\n\n{passage}",
        "Is the following review positive or negative?{rest}",
        "Classify each of these{rest}",
    ),
}

PASSAGES = (
    "Write a short encyclopedia entry about {topic}.",
    "Write a news report from {place} about {topic}.",
    "Write a paragraph about the life of {name}, who lives in {place} and loves {topic}.",
    "Write a paragraph about the history of {place}.",
    "Tell me what happened to {name} and {name} in {place} last summer.",
    "Explain {topic} in one paragraph.",
    "Write a short report on {topic} in {place}, with names, dates and numbers.",
    "Describe a company in {place} that sells {thing}.",
    "Write the first paragraph of a newspaper article about a court case in {place}.",
    "Write a short text about a football match between {place} and {place}.",
)
"""Requests to the model for a passage."""

WEIGHTS = {"maths": 4, "translation": 3, "summary": 3, "question": 4, "retrieval": 3}
"""How much more often than the other kinds."""


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


LISTED_FIELDS: dict[str, tuple[str, ...]] = {
    "name": _listed(
        "Ada|Amir|Anna|Ben|Bruno|Carla|Chen|Clara|Daniel|Dora|Elena|Emma|Farid|Felix|Grace|Hana|Hugo|"
        "Ida|Ivan|Jack|Jamila|Jonas|Julia|Karim|Kate|Lena|Leo|Lucia|Maria|Max|Mina|Nadia|Noah|Olga|"
        "Omar|Paula|Peter|Priya|Rosa|Sam|Sofia|Tariq|Tom|Uma|Victor|Wendy|Yara|Zoe"
    ),
    "thing": _listed(
        "apples|books|candles|chairs|coins|cookies|cards|eggs|flowers|marbles|oranges|pencils|plates|"
        "stamps|stickers|tickets|toy cars|bottles of water|bags of rice|balloons|shirts|cupcakes|"
        "notebooks|tomatoes|fish"
    ),
    "place": _listed(
        "Athens|Berlin|Boston|Brazil|Cairo|Canada|Chicago|Delhi|Edinburgh|Ghana|Iceland|Istanbul|Japan|"
        "Kenya|Lima|Lisbon|London|Madrid|Mexico City|Mumbai|New York|Norway|Paris|Peru|Rome|Scotland|"
        "Seoul|Sydney|Texas|Toronto|Vienna|Warsaw"
    ),
    "language": (
        "German",
        "French",
        "Spanish",
        "Italian",
        "Portuguese",
        "Dutch",
        "German",
        "French",
    ),
    "topic": _listed(
        "photosynthesis|the French Revolution|black holes|bees|chess|climate change|the stock market|"
        "vaccines|machine learning|jazz|volcanoes|ancient Egypt|the human heart|democracy|bicycles|"
        "the water cycle|whales|bread|gravity|the printing press|football|deserts|electric cars|"
        "mountains|the Silk Road|dreams|friendship|inflation|the moon|antibiotics|coffee|rivers|"
        "dinosaurs|the Olympic Games|time travel|a lighthouse|recycling|robots|opera|the solar system|"
        "tea|a lost dog|winter|cities of the future|genes|space travel|school|forests|libraries|"
        "earthquakes|honesty|music|the Roman Empire|sleep|cooking|migration|trade|bridges|"
        "renewable energy|public transport"
    ),
}

_ABOUT_PASSAGES = {
    kind: chosen
    for kind, stems in TEMPLATES.items()
    if (chosen := tuple(s for s in stems if "{passage}" in s))
}

_HOLE = re.compile(r"\{(\w+)\}")


def draw_template(random: Random, *, about_passages: bool = False) -> str:
    """A random template with its list fields filled; the fields that the model writes are still in
    braces.

    about_passages: only templates with a passage.
    """
    kinds = sorted(_ABOUT_PASSAGES if about_passages else TEMPLATES)
    kind = random.choices(kinds, [WEIGHTS.get(name, 1) for name in kinds])[0]
    return _drawn(random.choice((_ABOUT_PASSAGES if about_passages else TEMPLATES)[kind]), random)


def passage_request(random: Random) -> str:
    """A random request for a passage."""
    return _drawn(random.choice(PASSAGES), random)


def _drawn(pattern: str, random: Random) -> str:
    def fill(hole: re.Match[str]) -> str:
        if hole[1] in GENERATED_FIELDS:
            return hole[0]
        if hole[1] == "number":
            return str(random.choice((1, 1, 5)) * random.randint(2, random.choice((12, 60))))
        return random.choice(LISTED_FIELDS[hole[1]])

    return _HOLE.sub(fill, pattern)


def split_template(pattern: str) -> list[str]:
    """A template as alternating literal texts and fields; it begins with a literal, which may be
    empty.
    """
    return _HOLE.split(pattern)
