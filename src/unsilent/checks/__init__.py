"""One file per check, all behind the protocol in ``protocol.py``."""
