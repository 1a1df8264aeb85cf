"""``unsilent study bits``: what is run, what it amounts to, and how it is told."""
