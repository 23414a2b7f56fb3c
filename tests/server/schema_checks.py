"""Owns one check for schemathesis, which loads this file by itself (`SCHEMATHESIS_HOOKS`): what the document calls right is
answered.

It stands for schemathesis' own `positive_data_acceptance`, which knows no rule that a schema cannot write down. Such a
refusal bears one of the codes below, and none other.
"""

import json

import schemathesis
from schemathesis import GenerationMode

BEYOND_SCHEMAS = {
    "fields_disagree",  # of two fields that are right alone
    "context_length_exceeded",  # tokens are not characters
    "template_refuses",  # a chat template is a program
    "invalid_arguments",  # JSON inside a text
    "invalid_grammar",  # a schema, an expression and a grammar are programs
}


@schemathesis.check
def what_is_right_is_answered(ctx, response, case):
    if case.meta is None or case.meta.generation.mode is not GenerationMode.POSITIVE or response.status_code != 400:
        return
    error = json.loads(response.content)["error"]
    if error["code"] == "not_served" and case.path == "/v1/embeddings":
        return
    assert error["code"] in BEYOND_SCHEMAS, f"right by the document, and refused: {error}"
