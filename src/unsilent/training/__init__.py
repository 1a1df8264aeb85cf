"""What ``unsilent train`` trains: a LLaMA of a chosen size on bytes of real text. A guard needs none of it."""
