"""The formats on disk: the schema is sound, golden files stay readable and are what the code still writes."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest

from tests.golden.make_events import LATER, make
from unsilent.events import SCHEMA_VERSION, EventKind, read
from unsilent.records import Action, Site

GOLDEN = Path(__file__).parent.parent / "golden"


def event_schema() -> dict[str, Any]:
    return json.loads(files("unsilent.schemas").joinpath("event.schema.json").read_text("utf-8"))


def test_the_event_schema_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(event_schema())


def test_every_golden_event_follows_the_schema() -> None:
    validator = jsonschema.Draft202012Validator(event_schema())
    for line in (GOLDEN / "events-v1.jsonl").read_text("utf-8").splitlines():
        validator.validate(json.loads(line))


def test_the_schema_refuses_an_unknown_kind_and_a_missing_step() -> None:
    validator = jsonschema.Draft202012Validator(event_schema())
    line = json.loads((GOLDEN / "events-v1.jsonl").read_text("utf-8").splitlines()[0])
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**line, "kind": "surprise"})
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({key: value for key, value in line.items() if key != "step"})


def test_schema_and_code_name_the_same_kinds_sites_and_actions() -> None:
    properties = event_schema()["properties"]
    assert properties["schema"]["const"] == SCHEMA_VERSION
    assert properties["kind"]["enum"] == list(get_args(EventKind))
    assert properties["site"]["enum"] == [*(site.value for site in Site), None]
    assert properties["action"]["enum"] == [*(action.value for action in Action), None]
    assert properties["would"]["enum"] == [*(action.value for action in Action), None]


def test_golden_events_hold_every_kind_and_are_still_written_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path)
    written = (tmp_path / "events.jsonl").read_bytes()
    assert written == (GOLDEN / "events-v1.jsonl").read_bytes()
    assert sorted(event.kind for event in read(tmp_path).events) == sorted(get_args(EventKind))


def test_golden_events_are_read(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes((GOLDEN / "events-v1.jsonl").read_bytes())
    log = read(tmp_path)
    assert (len(log.events), log.unreadable, log.torn, log.newer) == (20, 0, False, 0)
    quarantine = next(event for event in log.events if event.kind == "quarantine")
    assert quarantine.step == 10
    assert quarantine.time == 1_700_000_015.0
    assert quarantine.fields["verdict"] == json.loads(json.dumps(LATER.to_json()))
