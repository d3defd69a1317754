"""Bodies drawn from the OpenAPI document, valid and invalid, by a fuzzer that knows nothing of the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis", reason="pip install schemathesis")


def test_drawn_requests_are_answered_or_refused(client: Any) -> None:
    document = client.get("/openapi.json").json()
    names = ["letters", "talker", "encoder"]
    for one in document["components"]["schemas"].values():  # models that there are, and short texts
        if "model" in one.get("properties", {}):
            one["properties"]["model"] = {"enum": [*names, "nothing"]}
        for length in ("max_tokens", "max_output_tokens", "max_completion_tokens"):
            if length in one.get("properties", {}):
                one["properties"][length] = {"enum": [1, 2, 0, -1, "2"]}
                one["required"] = sorted({*one.get("required", ()), length})
    schema = schemathesis.openapi.from_dict(document)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(
            max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        def check(case: Any) -> None:
            raw = json.dumps(case.body) if isinstance(case.body, dict | list) else None
            headers = {"content-type": "application/json"}
            response = client.request(case.method, case.formatted_path, content=raw, headers=headers)
            assert response.status_code < 500, (case.formatted_path, raw, response.text)
            assert "Traceback" not in response.text
            seen.add((case.path, response.status_code))

        check()
    assert {path for path, _ in seen} == set(document["paths"])
    assert {status for _, status in seen} >= {200, 400, 404}
