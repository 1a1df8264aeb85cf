"""What a certificate says, that old ones stay readable, and that no bit of one can change unseen."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unsilent.checkpoint import Certificate, CheckRun, Problem, Status, Trust, attach, certify, may_publish, verify
from unsilent.checkpoint.certificate import FileDigest
from unsilent.errors import CheckpointError, UsageError
from unsilent.fingerprints import fingerprint

GOLDEN = Path(__file__).parents[1] / "golden" / "certificate-v1.json"
SCHEMA = Path(__file__).parents[2] / "src" / "unsilent" / "schemas" / "certificate.schema.json"


def example(**changes) -> Certificate:
    values = {
        "steps": 20,
        "created": "2030-01-02T03:04:05+00:00",
        "torch": "2.13.0",
        "status": Status.CANDIDATE,
        "world_size": 3,
        "checks": (CheckRun(check="audit", steps=(9, 19)), CheckRun(check="replicas", steps=(20,))),
        "tensors": {"model.weight": fingerprint(torch.tensor([[1.0, float("nan")], [-0.0, 2.5]])).to_json()},
        "files": {
            ".metadata": FileDigest(sha256="ab" * 32, size=7),
            "__0_0.distcp": FileDigest(sha256="cd" * 32, size=9),
        },
        "rng": {"0": "ef" * 32, "2": "01" * 32},
    }
    return Certificate(**{**values, **changes})


def test_reading_gives_back_what_was_written():
    certificate = example(status=Status.DISTRUSTED, reason='audit of rank 2 failed: "4.0001" ≠ 4.0000')
    assert Certificate.loads(certificate.dumps()) == certificate


def test_the_golden_certificate_stays_readable_and_is_written_alike():
    assert Certificate.loads(GOLDEN.read_text()) == example()
    assert json.loads(GOLDEN.read_text()) == example().to_json()


def test_the_schema_describes_it():
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    for record in (example().to_json(), certify({}, steps=0).to_json(), json.loads(GOLDEN.read_text())):
        jsonschema.Draft202012Validator(schema).validate(record)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(example().to_json() | {"status": "verified correct"}, schema)


def test_no_single_flipped_bit_reads_as_another_certificate():
    text = example().dumps().encode()
    for at in range(len(text)):
        for bit in range(8):
            changed = bytearray(text)
            changed[at] ^= 1 << bit
            try:
                found = Certificate.loads(bytes(changed))
            except CheckpointError:
                continue
            assert found == example(), f"bit {bit} of byte {at}"


def test_a_newer_format_is_refused_by_name():
    record = example().to_json() | {"format": 2}
    with pytest.raises(CheckpointError, match="format 2; this version of unsilent reads format 1"):
        Certificate.loads(json.dumps(record))


def test_a_file_name_cannot_point_out_of_the_checkpoint():
    for name in ("../other/.metadata", "/etc/passwd", "a/../../b"):
        with pytest.raises(CheckpointError, match="points out of the checkpoint"):
            Certificate.loads(example(files={name: FileDigest(sha256="ab" * 32, size=1)}).dumps())


def test_reading_a_certificate_does_not_import_torch():
    code = (
        "import sys; from unsilent.checkpoint import Certificate, Trust, may_publish, checkpoints_in; "
        f"Certificate.loads(open({str(GOLDEN)!r}).read()); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_problems_are_told_with_file_and_tensors():
    problem = Problem(path="run/step-00000020", file="__1_0.distcp", tensors=tuple("abcde"), reason="cut", rank=2)
    assert str(problem) == "run/step-00000020/__1_0.distcp: cut (seen by rank 2) [a, b, c and 2 more]"


def test_publishing_waits_for_a_clean_audit_of_every_rank():
    candidate = example()  # 20 updates completed: it ends with step 19
    replicas = frozenset({20})
    assert may_publish(candidate, Trust(clean_audits=(19, 19, 19), clean_replicas=replicas)) == "yes"
    assert may_publish(candidate, Trust(clean_audits=(40, 19, 25), clean_replicas=replicas)) == "yes"
    assert may_publish(candidate, Trust(clean_audits=(19, 18, 19), clean_replicas=replicas)) == "wait"
    assert may_publish(candidate, Trust(clean_audits=(19, None, 19), clean_replicas=replicas)) == "wait"
    assert may_publish(candidate, Trust(clean_audits=(19, 19, 19))) == "wait"
    assert may_publish(candidate, Trust(clean_audits=(), clean_replicas=replicas)) == "wait"


def test_publishing_is_refused_after_the_last_clean_audit_of_a_device_that_failed():
    clean = {"clean_audits": (30, 30, 30), "clean_replicas": frozenset({20})}
    assert may_publish(example(), Trust(**clean, doubted_after=10)) == "no"
    assert may_publish(example(), Trust(**clean, doubted_after=20)) == "yes"
    assert may_publish(example(status=Status.CERTIFIED), Trust(**clean, doubted_after=10)) == "no"
    assert may_publish(example(status=Status.CERTIFIED), Trust(clean_audits=(None,) * 3)) == "yes"
    assert may_publish(example(status=Status.DISTRUSTED, reason="x"), Trust(**clean)) == "no"


def test_another_writer_gets_a_certificate_for_its_files(tmp_path):
    weights = {
        "linear": {"weight": torch.randn(3, 4).bfloat16().t(), "scale": torch.tensor(2.0)},
        "empty": torch.empty(0),
    }
    certificate = certify({"model": weights}, steps=7)
    assert set(certificate.tensors) == {"model.linear.weight", "model.linear.scale", "model.empty"}
    weights["linear"]["scale"] += 1  # the copy is what counts, not what becomes of it
    with pytest.raises(UsageError, match="holds no files"):
        attach(certificate, tmp_path)
    with pytest.raises(UsageError, match="no directory"):
        attach(certificate, tmp_path / "missing")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "weights.bin").write_bytes(b"1234")
    complete = attach(certificate, tmp_path)
    assert complete.files["deep/weights.bin"].size == 4
    assert verify(tmp_path) == []
    (tmp_path / "deep" / "weights.bin").write_bytes(b"1235")
    (problem,) = verify(tmp_path)
    assert problem.file == "deep/weights.bin" and "SHA-256" in problem.reason
    (tmp_path / "deep" / "weights.bin").unlink()
    assert "missing" in verify(tmp_path)[0].reason


def test_verify_says_when_there_is_nothing_to_verify(tmp_path):
    assert "no such directory" in verify(tmp_path / "none")[0].reason
    assert "no certificate" in verify(tmp_path)[0].reason
