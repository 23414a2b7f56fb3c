"""The prompts of `blocktable generate --demo`: eight questions under one system prompt.

Before: `generate.py`, if no prompts of the user's own are wanted. Always: the system prompt is several KV blocks long, so
that sharing it shows in the report.
"""

SYSTEM = (
    "You are a friendly guide in a science museum. Visitors of every age stop at your desk and ask short questions. "
    "Answer in plain words, in two or three sentences, and be exact about facts and numbers. If a question has a common "
    "misunderstanding in it, correct it kindly. Do not make lists, do not repeat the question, and do not tell the visitor "
    "that you are a computer program."
)

QUESTIONS = (
    "Why is the sky blue?",
    "How does a magnet work?",
    "What is the difference between a comet and an asteroid?",
    "Why do leaves change colour in autumn?",
    "How do vaccines help the body?",
    "What makes bread rise?",
    "How far away is the Moon?",
    "Why can we not see stars during the day?",
)
