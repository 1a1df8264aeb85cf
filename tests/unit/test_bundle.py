"""What a full bundle holds for a rerun: what is written is what is read, what is missing is named."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tests.golden import make_bundle
from unsilent.bundle import Bundle, read
from unsilent.cli import app
from unsilent.errors import UsageError
from unsilent.evidence import EvidenceStore

GOLDEN = Path(__file__).parent.parent / "golden" / "bundle-v1"
ENTRY = "tests.golden.make_bundle:make"


def replay(*words: object) -> Result:
    return CliRunner().invoke(app, ["replay", *(str(word) for word in words)])


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle.write(tmp_path)


def facts(bundle: Path, **changes: Any) -> None:
    """Change the facts of a bundle."""
    body = json.loads((bundle / "evidence.json").read_text())
    body["record"]["rerun"] |= changes
    (bundle / "evidence.json").write_text(json.dumps(body))


def test_a_bundle_holds_weights_batch_and_what_the_forward_begins_from(bundle: Path) -> None:
    found = read(bundle)
    assert (found.step, found.check, found.auditee, found.agreed) == (1, "audit", 0, found.executions[1]["digest"])
    assert [e["recorded"] for e in found.executions][:2] == [True, False]
    assert found.executions[0]["digest"] != found.agreed
    assert found.weights is not None
    assert found.weights["weight"].tolist() == [0.5, 1.5, 3.5]  # after one update
    assert found.work is not None
    (micro_batch,) = found.work.micro_batches
    assert micro_batch.batch.tolist() == [2.0, 2.0, 2.0]
    assert micro_batch.buffers["made"].tolist() == [1.0]
    assert len(micro_batch.generators.digest) == 64
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.iterdir()} == {0o600}


def test_only_full_keeps_anything_of_it(tmp_path: Path) -> None:
    for level in ("digests", "slices"):
        store = EvidenceStore(tmp_path / level, rank=0, level=level)
        kept = store.save(1, "audit", {}, parts={"work": {"batch": torch.tensor([123456789])}})
        assert kept is not None
        assert sorted(path.name for path in kept.iterdir()) == ["evidence.json"]
        assert json.loads((kept / "evidence.json").read_text())["left_out"] == {}


def test_the_replay_gives_the_agreed_value_and_not_the_recorded_one(bundle: Path, tmp_path: Path) -> None:
    result = replay(bundle, "--entry", ENTRY, "--json", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["outcome"] == "as replayed"
    assert record["reruns"] == [record["agreed"]] * 2
    assert record["differs_from_recorded"] == ["loss[0]"]  # the fault lies behind the product
    assert record["environment"] == []
    assert json.loads((tmp_path / "out" / "replay.json").read_text()) == record


def test_the_golden_bundle_is_read_and_gives_the_same_bits_on_any_machine() -> None:
    result = replay(GOLDEN, "--entry", ENTRY, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["outcome"] == "as replayed"


def test_a_golden_bundle_is_what_is_still_written(bundle: Path) -> None:
    old, new = (json.loads((path / "evidence.json").read_text()) for path in (GOLDEN, bundle))
    assert old.keys() == new.keys()
    for key in ("auditee", "executions", "agreed", "strength", "kernels", "scale", "loss_scale", "evaluating"):
        assert old["record"]["rerun"][key] == new["record"]["rerun"][key], key
    one, other = read(GOLDEN), read(bundle)
    assert one.work is not None and other.work is not None
    assert torch.equal(one.work.micro_batches[0].batch, other.work.micro_batches[0].batch)


def test_a_fresh_process_needs_no_more_than_the_bundle(bundle: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(bundle, moved)
    shutil.rmtree(bundle)
    command = [sys.executable, "-m", "unsilent", "replay", str(moved), "--entry", ENTRY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=GOLDEN.parents[2], timeout=120)
    assert done.returncode == 0, done.stderr
    assert "does not come out again" in done.stdout


def test_what_the_cap_left_out_is_named_with_its_size(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, rank=0, level="full", max_bytes=10_000)
    parts = {"work": {"batch": torch.zeros(10)}, "weights": {"w": torch.zeros(2000)}}
    golden = json.loads((GOLDEN / "evidence.json").read_text())["record"]["rerun"]
    kept = store.save(5, "audit", {"rerun": golden}, parts=parts)
    assert kept is not None
    body = json.loads((kept / "evidence.json").read_text())
    assert (body["level"], body["left_out"]) == ("full", {"weights": 8000})
    shutil.copy(GOLDEN / "work.pt", kept / "work.pt")
    result = replay(kept, "--entry", ENTRY)
    assert result.exit_code == 2
    assert "weights (8,000 bytes) of step 5 did not fit" in result.stderr
    assert "unsilent recheck" in result.stderr


def test_the_most_important_part_is_kept_first(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, rank=0, level="full", max_bytes=10_000)
    kept = store.save(1, "audit", {}, parts={"work": torch.zeros(3000), "weights": torch.zeros(10)})
    assert kept is not None
    # Weights without the work are of no use, and would only push others out.
    assert json.loads((kept / "evidence.json").read_text())["left_out"] == {"work": 12_000, "weights": 40}


@pytest.mark.parametrize("name", ["work", "weights"])
def test_a_part_that_is_gone_or_damaged_is_named(bundle: Path, name: str) -> None:
    (bundle / f"{name}.pt").write_bytes(b"torn")
    result = replay(bundle, "--entry", ENTRY)
    assert (result.exit_code, f"{name}.pt: cannot be read" in result.stderr) == (2, True), result.stderr
    (bundle / f"{name}.pt").unlink()
    result = replay(bundle, "--entry", ENTRY)
    assert (result.exit_code, f"{name} of step 1 are no longer in the bundle" in result.stderr) == (2, True)


def test_a_batch_of_other_kinds_is_unpickled_only_when_asked(bundle: Path) -> None:
    saved = torch.load(bundle / "work.pt", weights_only=True)
    saved["micro_batches"][0]["batch"] = Path("a class that is no plain container")
    torch.save(saved, bundle / "work.pt")
    with pytest.raises(UsageError, match="add --trusted"):
        read(bundle)
    found: Bundle = read(bundle, trusted=True)
    assert found.work is not None and isinstance(found.work.micro_batches[0].batch, Path)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("make", "must be module:function"),
        ("tests.golden.make_bundle:nothing", "cannot be found"),
        ("no.such.module:make", "cannot be found"),
        ("collections:OrderedDict", "must return (model, loss_fn)"),
        ("tests.ranks.offline_job:make", "this is not the model of the run"),
    ],
)
def test_an_entry_that_is_none_is_refused_in_one_sentence(bundle: Path, entry: str, words: str) -> None:
    assert OrderedDict() == {}  # what the entry above gives: a mapping, no model
    result = replay(bundle, "--entry", entry)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert words in result.stderr


def test_without_an_entry_the_run_must_be_one_of_unsilent_train(bundle: Path) -> None:
    result = replay(bundle)
    assert (result.exit_code, "add --entry" in result.stderr) == (2, True)


def test_a_newer_format_is_refused(bundle: Path) -> None:
    facts(bundle, schema=2)
    with pytest.raises(UsageError, match="newer version"):
        read(bundle)


def test_no_bundle_and_a_bundle_without_work_say_why(tmp_path: Path, bundle: Path) -> None:
    with pytest.raises(UsageError, match="not an evidence bundle"):
        read(tmp_path)
    low = EvidenceStore(tmp_path / "low", rank=0).save(1, "audit", {})
    assert low is not None
    with pytest.raises(UsageError, match='only "full" keeps'):
        read(low)
    beside = EvidenceStore(bundle.parents[1], rank=0, level="full").save(1, "audit", {"rerun": {}})
    assert beside is not None
    with pytest.raises(UsageError, match=f"did not hold the work; look at {bundle.name}"):
        read(beside)
    vote = EvidenceStore(bundle.parents[1], rank=0, level="full").save(7, "replicas", {"rerun": {}})
    assert vote is not None
    with pytest.raises(UsageError, match="no audit has looked at"):
        read(vote)


def test_another_environment_is_named_where_the_value_differs(bundle: Path) -> None:
    found = read(bundle)
    facts(
        bundle,
        agreed="0" * 16,
        executions=[dict(e, digest="0" * 16 if not e["recorded"] else "1" * 16) for e in found.executions],
        environment=dict(found.environment) | {"cpu": "another one"},
    )
    result = replay(bundle, "--entry", ENTRY)
    assert result.exit_code == 12
    assert "no execution of the run gave" in result.stdout
    assert "was 'another one' there" in result.stdout
