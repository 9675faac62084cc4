"""No reply that a grammar lets through is rejected by a JSON Schema validator once it is parsed."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from neper.errors import InvalidRequestError
from neper.text.grammar import json_schema
from neper.text.matcher import Grammars
from tests.text.conftest import Pair
from tests.text.random_schemas import SchemaMaker, Writer, validator_of

END = 2
VOCAB_SIZE = 601
TEXTS = 4


@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")  # patterns such as [a&&b], of which re warns jsonschema
@pytest.mark.rounds(120)
def test_case_86_no_reply_breaks_its_schema_once_parsed(byte_level: Pair, rounds: int) -> None:
    grammars = Grammars(byte_level.ours, VOCAB_SIZE, (END,))
    writer = Writer(byte_level.ours, END, VOCAB_SIZE)
    counts: Counter[str] = Counter()
    for seed in range(rounds):
        schema = SchemaMaker(seed).make()
        try:
            text = json_schema(schema).text()
        except InvalidRequestError:
            counts["refused"] += 1
            continue
        try:
            grammars.matcher(text)
        except InvalidRequestError:
            counts["no value, or too much"] += 1
            continue
        validator = validator_of(schema)
        for number in range(TEXTS):
            reply = writer.write(grammars.matcher(text), schema, TEXTS * seed + number)
            if reply is None:
                counts["no end"] += 1
                continue
            counts["replies"] += 1
            validator.validate(json.loads(reply))
    assert counts["refused"] < 0.5 * rounds, counts
    assert counts["no end"] < 0.3 * counts["replies"], counts
    print(counts)
