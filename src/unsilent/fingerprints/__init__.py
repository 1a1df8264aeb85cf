"""The order-sensitive exact digest of a tensor's bits; linear, so that the digests of shards add up to the whole's."""

from unsilent.fingerprints.compute import combine, sums, sums_many, sums_of_shard
from unsilent.fingerprints.record import Fingerprint, fingerprint
from unsilent.fingerprints.sparse import elements, sums_of_gradients

__all__ = [
    "Fingerprint", "combine", "elements", "fingerprint", "sums", "sums_many", "sums_of_gradients", "sums_of_shard",
]  # fmt: skip
