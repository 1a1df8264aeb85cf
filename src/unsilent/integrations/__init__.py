"""Other libraries, one file each, independent of one another; none of them is imported here."""
