"""What is done about a finding, from cheap to dear; one file each."""
