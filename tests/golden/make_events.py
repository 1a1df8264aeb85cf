"""The calls that made ``events-v1.jsonl``: one event of each kind. The file is frozen; a new version gets a new file."""

from __future__ import annotations

from itertools import count
from pathlib import Path

from unsilent.events import EventLog
from unsilent.records import Action, Kind, Site, Suspect, Verdict

SUSPECT = Suspect(rank=2, node="node2", device="cpu:0")
VERDICT = Verdict(
    kind=Kind.TRANSIENT,
    site=Site.GRADIENT,
    step=7,
    reason="exactly one execution of rank 2 differs",
    check="audit",
    suspects=(SUSPECT,),
    tensors=("model.layers.0.weight",),
    elements=(128, 129),
)
LATER = Verdict(
    kind=Kind.PERSISTENT,
    site=Site.GRADIENT,
    step=9,
    reason="rank 2 does not repeat what its neighbours repeat",
    check="audit",
    suspects=(SUSPECT,),
)
TALLY = {"finite": {"ran": 12, "alarms": 0, "seconds": 0.25}, "audit": {"ran": 3, "alarms": 2, "seconds": 4.5}}


def make(directory: Path) -> None:
    """Write the events into ``directory``, one second apart."""
    seconds = count(1_700_000_000)
    log = EventLog(directory, rank=0, run_id="run-1", clock=lambda: float(next(seconds)))
    nodes = [f"node{rank}" for rank in range(4)]
    log.write("run_started", 0, world_size=4, nodes=nodes, mode="act", quarantine="ask", environment="5f3a")
    blind = "finite wrong values"
    rows = [
        {"site": "gradient", "check": "finite", "how": "exact", "when": "every step", "blind": blind},
        {"site": "reduction", "check": "", "how": "", "when": "", "blind": "finite wrong sums"},
    ]
    log.write("coverage", 0, rows=rows)
    log.write("calibration", 1, check="audit", strength="bitwise", kernels="default")
    log.write("check_degraded", 3, check="audit", reason="gradients do not repeat here")
    log.write("check_disabled", 4, check="replicas", reason="a fault in the check itself")
    log.write("verdict", 7, verdict=VERDICT, action=Action.REPAIR, would=Action.REPAIR, evidence="evidence/7-audit-0")
    log.write("action", 7, verdict=VERDICT, action=Action.REPAIR, seconds=0.5, reason="the auditor holds the gradient")
    log.write("checkpoint", 8, steps=8, path="checkpoints/8", status="candidate", tally=TALLY)
    log.write("checkpoint_refused", 9, check="replicas", site=Site.WEIGHTS, reason="rank 3 holds other weights")
    log.write("trust_withdrawn", 9, verdict=LATER, steps=[8])
    log.write("rank_failure", 9, failed_rank=1, error="ValueError: no more data")
    log.write("guard_error", 9, check="replicas", failed_rank=1, error="RuntimeError: out of memory")
    log.write("needs_human", 9, reason="recorded and recomputed gradients differ by 7 % of the norm")
    log.write("ask", 9, verdict=LATER, reason="take node2 out?")
    log.write("approved", -1, node="node2")
    log.write("quarantine", 10, verdict=LATER, action=Action.QUARANTINE, resume_from="checkpoints/6")
    log.write("notice", 10, text="a checkpoint without a certificate was loaded")
    log.write("finished", 10, exit_code=11, tally=TALLY, resume_from="checkpoints/6")
    log.write(
        "fingerprints", 10, steps=10, switched={"deterministic": [7, 9]}, weights="00c0ffee00c0ffee",
        optimizer_state="0123456789abcdef", buffers=None, gradient="00000000deadbeef", undone_after=None,
    )  # fmt: skip
    log.write(
        "spike_confirmed", 10, check="update", site=Site.GRADIENT, ranks=[1], tensors=["model.layers.0.weight"],
        reason="its gradient is 40 times what was expected; audited bit by bit",
    )  # fmt: skip
    log.close()
