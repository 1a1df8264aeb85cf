"""The order-sensitive exact digest of a tensor's bits; linear, so that the digests of shards add up to the whole's."""

from unsilent.fingerprints.compute import combine, sums, sums_many, sums_of_shard
from unsilent.fingerprints.record import Fingerprint, fingerprint

__all__ = ["Fingerprint", "combine", "fingerprint", "sums", "sums_many", "sums_of_shard"]
