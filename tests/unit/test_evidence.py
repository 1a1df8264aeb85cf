"""Evidence bundles: what each level keeps, and the caps."""

from __future__ import annotations

import json
import os
import stat
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from unsilent import evidence
from unsilent.evidence import EvidenceStore, Level, device_counters, read_bundle
from unsilent.records import Kind, Site, Verdict

VERDICT = Verdict(kind=Kind.SOFTWARE, site=Site.GRADIENT, step=3, reason="NaN", check="finite")
GRADIENT = torch.arange(1000, dtype=torch.float32)
BATCH = {"tokens": torch.tensor([123456789])}


def names(bundle: Path | None) -> list[str]:
    assert bundle is not None
    return sorted(path.name for path in bundle.iterdir())


def save(store: EvidenceStore, step: int = 3, **more: Any) -> Path | None:
    return store.save(step, "finite", {"verdict": VERDICT}, tensors={"w": GRADIENT}, batch=BATCH, **more)


def test_digests_keep_no_value(tmp_path: Path) -> None:
    bundle = save(EvidenceStore(tmp_path, rank=1))
    assert bundle == tmp_path / "evidence" / "3-finite-0"
    assert names(bundle) == ["evidence.json"]
    body = read_bundle(bundle)
    assert body is not None
    assert (body["schema"], body["rank"], body["level"]) == (1, 1, "digests")
    assert body["tensors"] == {"w": {"shape": [1000], "dtype": "torch.float32"}}
    assert body["record"]["verdict"]["kind"] == "SOFTWARE"
    assert body["device_counters"] == {}
    assert "123456789" not in (bundle / "evidence.json").read_text()


def test_everything_is_for_the_owner_only(tmp_path: Path) -> None:
    bundle = save(EvidenceStore(tmp_path, rank=0, level="full"))
    assert bundle is not None
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in bundle.iterdir()} == {0o600}


def test_slices_keep_a_few_elements_and_nothing_of_the_batch(tmp_path: Path) -> None:
    bundle = save(EvidenceStore(tmp_path, rank=0, level="slices", slice_elements=8), elements={"w": (995, 996)})
    assert bundle is not None
    assert names(bundle) == ["evidence.json", "slices.pt"]
    kept = torch.load(bundle / "slices.pt", weights_only=True)
    assert kept["w"]["start"] == 995
    assert kept["w"]["values"].tolist() == [995.0, 996.0, 997.0, 998.0, 999.0]
    assert (bundle / "slices.pt").stat().st_size < 3000


def test_slices_of_a_sparse_tensor_are_of_its_values(tmp_path: Path) -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    bundle = EvidenceStore(tmp_path, rank=0, level="slices").save(1, "finite", {}, tensors={"e": sparse})
    assert bundle is not None
    assert torch.load(bundle / "slices.pt", weights_only=True)["e"]["values"].tolist() == [5.0]


def test_full_keeps_tensors_and_batch(tmp_path: Path) -> None:
    bundle = save(EvidenceStore(tmp_path, rank=0, level=Level.FULL))
    assert bundle is not None
    assert names(bundle) == ["batch.pt", "evidence.json", "tensors.pt"]
    assert torch.equal(torch.load(bundle / "tensors.pt", weights_only=True)["w"], GRADIENT)
    assert torch.equal(torch.load(bundle / "batch.pt", weights_only=True)["tokens"], BATCH["tokens"])


def test_a_record_never_holds_a_tensors_values(tmp_path: Path) -> None:
    bundle = EvidenceStore(tmp_path, rank=0).save(1, "audit", {"loss": torch.tensor(4321.5), "nan": float("nan")})
    body = read_bundle(bundle or "")
    assert body is not None
    assert body["record"] == {"loss": {"shape": [], "dtype": "torch.float32"}, "nan": "nan"}


def test_bundles_of_one_step_are_numbered_and_odd_names_are_tamed(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, rank=0)
    assert [names(save(store)) for _ in range(2)] == [["evidence.json"]] * 2
    odd = store.save(3, "../audit x", {})
    found = sorted(path.name for path in (tmp_path / "evidence").iterdir())
    assert found == ["3-.._audit_x-0", "3-finite-0", "3-finite-1"]
    assert odd is not None
    assert odd.parent == tmp_path / "evidence"


def test_the_oldest_bundles_make_room(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, rank=0, keep=3)
    for step in range(6):
        bundle = save(store, step)
        assert bundle is not None
        os.utime(bundle, (step, step))
    kept = sorted(path.name for path in (tmp_path / "evidence").iterdir())
    assert kept == ["3-finite-0", "4-finite-0", "5-finite-0"]
    assert store.removed == 3


def test_the_size_cap_holds_and_a_bundle_too_large_is_kept_at_a_lower_level(tmp_path: Path) -> None:
    store = EvidenceStore(tmp_path, rank=0, level="full", max_bytes=20_000, slice_elements=16)
    for step in range(8):
        bundle = save(store, step)
        assert bundle is not None
        os.utime(bundle, (step, step))
    sizes = [file.stat().st_size for file in (tmp_path / "evidence").rglob("*") if file.is_file()]
    assert sum(sizes) <= 20_000
    huge = store.save(9, "audit", {}, tensors={"w": torch.zeros(100_000)})
    assert names(huge) == ["evidence.json", "slices.pt"]
    body = read_bundle(huge or "")
    assert body is not None
    assert (body["level"], body["asked_level"]) == ("slices", "full")


def test_what_cannot_be_written_is_counted_and_never_raises(tmp_path: Path) -> None:
    (tmp_path / "evidence").write_text("in the way")
    store = EvidenceStore(tmp_path, rank=0)
    assert save(store) is None
    assert store.lost == 1


class Opaque:
    def __init__(self) -> None:
        self.held = bytes(10_000)


def test_an_object_of_unknown_kind_is_measured_and_one_that_cannot_be_written_costs_only_the_level(
    tmp_path: Path,
) -> None:
    for number, (batch, level) in enumerate(((Opaque(), "slices"), (lambda: None, "slices"), (3, "full"))):
        store = EvidenceStore(tmp_path, rank=0, level="full", max_bytes=16_000)
        bundle = store.save(number, "audit", {}, batch=batch)
        assert bundle is not None and store.lost == 0
        assert (read_bundle(bundle) or {})["level"] == level


def test_a_failed_bundle_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("No space left on device")

    store = EvidenceStore(tmp_path, rank=0, level="full")
    monkeypatch.setattr(evidence, "_write_tensors", fails)
    assert store.save(1, "audit", {}, batch=BATCH) is None
    assert list((tmp_path / "evidence").iterdir()) == []
    assert store.lost == 1


def test_without_a_directory_nothing_is_kept() -> None:
    assert save(EvidenceStore(None, rank=0)) is None


def test_an_unknown_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="everything"):
        EvidenceStore(tmp_path, rank=0, level="everything")


def test_a_bundle_that_was_cut_off_reads_as_none(tmp_path: Path) -> None:
    assert read_bundle(tmp_path) is None
    (tmp_path / "evidence.json").write_text("{")
    assert read_bundle(tmp_path) is None


def test_counters_of_the_moment_are_kept(tmp_path: Path) -> None:
    bundle = save(EvidenceStore(tmp_path, rank=0, counters=lambda: {"temperature_c": 71}))
    assert bundle is not None
    assert json.loads((bundle / "evidence.json").read_text())["device_counters"] == {"temperature_c": 71}


def test_no_device_and_no_driver_give_no_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_counters(None) == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert device_counters(0) == {}


def test_each_counter_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: f"handle of {uuid}",
        nvmlDeviceGetHandleByIndex=lambda index: f"handle of {index}",
        nvmlDeviceGetTemperature=lambda handle, kind: 60 if handle == "handle of GPU-1" else 50,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetEccMode=lambda handle: (1, 1),
        nvmlDeviceGetTotalEccErrors=lambda handle, error, counter: 10 * error + counter,
        NVML_VOLATILE_ECC=0,
        NVML_AGGREGATE_ECC=1,
        NVML_MEMORY_ERROR_TYPE_CORRECTED=2,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=3,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert device_counters("GPU-1") == {
        "temperature_c": 60,
        "ecc_mode": "on",
        "ecc_corrected_volatile": 20,
        "ecc_uncorrected_volatile": 30,
        "ecc_corrected_aggregate": 21,
        "ecc_uncorrected_aggregate": 31,
    }
    assert device_counters(0)["temperature_c"] == 50
