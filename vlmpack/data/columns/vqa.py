"""A question about an image, with one answer or those of several people.

    {"question": "Which digit?", "answer": "seven", "image": "0.png"}
    {"question": "Which digit?", "answers": ["seven", "7", "seven"], "image": "0.png"}
    {"question": "Which digit?", "multiple_choice_answer": "seven", "image": "0.png",
     "answers": [{"answer": "seven", "answer_confidence": "yes", "answer_id": 1}]}

What is learnt is `answer`; without one `multiple_choice_answer`, VQAv2's word for the answer that
most people gave; without that the most frequent of `answers`, of equals the first. Answers that
are not learnt are a key that is not read, and counted as such.
"""

from __future__ import annotations

from collections import Counter

from vlmpack.data.columns.cells import answer_of, answered, asked, has_value, text_of
from vlmpack.data.columns.layout import Layout, Turned, known_by
from vlmpack.data.shards.json_text import number_text
from vlmpack.errors import schema_error
from vlmpack.words import kind_of

NAME = "vqa"
QUESTION = "question"
ANSWERS = ("answer", "multiple_choice_answer", "answers")
"""Where the answer is looked for, in this order."""


def turned(record: Turned) -> Turned:
    """The question and the answer as turns.

    Raises:
        DataError: (schema) either is no text.
    """
    source = next((name for name in ANSWERS if has_value(record.get(name))), ANSWERS[0])
    rest = {key: value for key, value in record.items() if key not in (QUESTION, source)}
    question = text_of(record, QUESTION, NAME)
    answer = (
        _most_frequent(record[source]) if source == ANSWERS[2] else answer_of(record, source, NAME)
    )
    return {**rest, "messages": [asked(question), answered(answer)]}


def _most_frequent(answers: object) -> str:
    given = answers if isinstance(answers, list) else [answers]
    found = [item.get("answer") if isinstance(item, dict) else item for item in given]
    found = [number_text(item) for item in found]
    texts = [text for text in found if isinstance(text, str) and text]
    if not texts or len(texts) < len(found):
        raise schema_error(
            f"'answers' is {kind_of(answers)} without texts alone; expected texts, or objects with "
            "'answer'"
        )
    return Counter(texts).most_common(1)[0][0]  # of equals, the one that was met first


LAYOUT = Layout(
    name=NAME,
    whose="VQA",
    signatures=tuple(known_by(QUESTION, answer) for answer in ANSWERS),
    turned=turned,
    is_made=True,
)
