"""The ledger: what is known of each device over many runs.

Each run appends to a file of its own in a directory that all runs share (``writing``). The files are read into runs
(``reading``), or folded into one SQLite file (``database``); what they say of devices, hosts and checks is worked out in
``history``. The lines themselves are described in ``entries`` and in ``docs/ledger.md``.
"""

from unsilent.ledger.database import Built, build, read_database
from unsilent.ledger.history import strike_history
from unsilent.ledger.reading import Contents, Device, Problem, read_directory
from unsilent.ledger.writing import RunLedger, note_approval

__all__ = [
    "Built",
    "Contents",
    "Device",
    "Problem",
    "RunLedger",
    "build",
    "note_approval",
    "read_database",
    "read_directory",
    "strike_history",
]
